"""The tests: collected once, in a process that forks for each trial."""

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from attacks.mutants.changes import ROOT


@dataclass(slots=True)
class Plan:
    """Which tests a trial may run: those of some folders or files, the quick ones of the rest; or
    those of some files alone. Files whose tests run in processes of their own, without the mutant,
    are left out.
    """

    folders: Sequence[str]
    left_out: Sequence[str] = ()
    only_files: frozenset[str] | None = None

    def is_in_folder(self, path: Path) -> bool:
        return any(path.is_relative_to(ROOT / folder) for folder in self.folders)


class Runner:
    """A pytest plugin: it collects as planned and hands the tests, by function, to what runs."""

    def __init__(self, plan: Plan, run: Callable[["Runner"], None]) -> None:
        self.plan, self._run = plan, run
        self.tests: dict[str, list[pytest.Item]] = defaultdict(list)
        self.failed = ""

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if not collection_path.name.startswith("test_"):
            return None
        if str(collection_path.relative_to(ROOT)) in self.plan.left_out:
            return True
        text = collection_path.read_text("utf-8")
        is_quick = "mark.quick" in text or "cases(" in text
        return not (is_quick or self.plan.is_in_folder(collection_path)) or None

    def pytest_collection(self) -> None:
        phases = (Phase.explicit, Phase.generate)  # a failure need not be made smaller
        same = settings.get_profile("same")
        settings.register_profile("mutants", same, phases=phases)
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [
            i for i in items if self.plan.is_in_folder(i.path) or i.get_closest_marker("quick")
        ]
        for item in items:
            self.tests[item.nodeid.partition("[")[0]].append(item)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.failed = self.failed or (report.nodeid if report.failed else "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or (report.nodeid if report.failed else "")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._run(self)
        return True

    def run_test(self, name: str) -> None:
        """Run a test function, with its parameters in turn, until it fails."""
        items = self.tests[name]
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                return


def run_pytest(plan: Plan, run: Callable[[Runner], None]) -> Runner:
    """Collect the tests and run them so, in this process."""
    runner = Runner(plan, run)
    os.chdir(ROOT)
    files = [*(plan.only_files if plan.only_files is not None else ["tests"])]
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "--capture=sys", "-q"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # Hypothesis is imported above
    pytest.main([*options, *files], plugins=[runner])
    return runner
