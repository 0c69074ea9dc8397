"""A folder of runs: what `pyggml-finetune -o FOLDER/adapter.gguf` wrote there so far.

A run is named by its adapter. While it is under way it holds its lock and adds lines to its
metrics; a half-written last line is left out until it is whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pyggml.cli.report.page import facts
from pyggml.cli.report.series import charts_of
from pyggml.cli.serve.errors import ApiError
from pyggml.cli.show import printable, size, span
from pyggml.cli.view.asked import shown
from pyggml.errors import ConfigError
from pyggml.lora.lock import holder
from pyggml.lora.record import metrics_beside, read_records

_METRICS, _OLD = ".metrics.jsonl", ".metrics.old.jsonl"
_MOST_RUNS, _MOST_BYTES = 200, 1 << 28
_RECENT = 20  # steps that the time left is judged by
Records = Sequence[Mapping[str, Any]]


class Runs:
    """The runs of a folder. Raises ConfigError if it is none."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            found = "is no folder" if folder.exists() else "does not exist"
            raise ConfigError(f"{folder}: {found}, wanted the folder of a run's adapter")
        self.folder = folder
        self._read: dict[str, tuple[object, list[Mapping[str, Any]]]] = {}

    def names(self) -> list[str]:
        """The runs, those with the newest lines first. Raises ApiError if the folder is gone."""
        try:
            files = list(self.folder.iterdir())
        except OSError as error:
            raise ApiError(410, f"{self.folder}: cannot be read: {error.strerror}") from None
        found: dict[str, float] = {}
        for path in files:
            if not path.is_file():  # a folder, or a pipe that would block
                continue
            if path.name.endswith(_METRICS) and not path.name.endswith(_OLD):
                found[path.name.removesuffix(_METRICS)] = _changed(path)
            elif path.name.startswith(".") and path.name.endswith(".gguf.lock"):
                found.setdefault(path.name[1:].removesuffix(".gguf.lock"), _changed(path))
        return sorted(found, key=found.__getitem__, reverse=True)[:_MOST_RUNS]

    def output(self, name: str) -> Path:
        """The adapter of a run, which may not be written yet. Raises ApiError if there is no such
        run."""
        if name not in self.names():
            raise ApiError(404, f"the folder has no run {shown(name)}", "name")
        return self.folder / f"{name}.gguf"

    def listed(self) -> list[dict[str, Any]]:
        """Name, state and version of every run; the version changes with its files."""
        return [
            {"name": name, "running": _is_running(output), "version": _version(output)}
            for name in self.names()
            for output in [self.folder / f"{name}.gguf"]
        ]

    def records(self, name: str) -> Records:
        """The lines of a run's metrics that are whole. Raises ApiError."""
        output = self.output(name)
        path, version = metrics_beside(output), _version(output)
        if path.exists() and path.stat().st_size > _MOST_BYTES:
            raise ApiError(413, f"{path.name} is larger than {size(_MOST_BYTES)}")
        known = self._read.get(name)
        if known is None or known[0] != version:
            known = self._read[name] = version, list(read_records(path))
        return known[1]

    def shown(self, name: str) -> dict[str, Any]:
        """A run as the page shows it. Raises ApiError if there is none."""
        output = self.output(name)
        running, version = _is_running(output), _version(output)
        records = self.records(name)
        steps = [r for r in records if r["event"] == "step"]
        last = steps[-1] if steps else {}
        return {
            "name": printable(name),
            "version": version,
            "state": _state(running, last),
            "step": last.get("step", 0),
            "n_steps": last.get("n_steps", 0),
            "left": _time_left(steps) if running else "",
            "facts": facts(records) if steps else [],
            "charts": charts_of(records),
            "adapter": size(output.stat().st_size) if output.is_file() else "",
            **_told(records),
        }


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # it has just gone
        return 0.0


def _version(output: Path) -> str:
    """Of the files of a run: other once one of them has changed."""
    found = []
    for path in (metrics_beside(output), output):
        try:
            stat = path.stat()
            found.append(f"{stat.st_ino:x}.{stat.st_size:x}.{stat.st_mtime_ns:x}")
        except OSError:
            found.append("")
    return "-".join(found)


def _is_running(output: Path) -> bool:
    return holder(output) is not None


def _state(running: bool, last: Mapping[str, Any]) -> str:
    if running:
        return "running" if last else "starting"
    if not last:
        return "empty"
    return "finished" if last["step"] == last.get("n_steps") else "stopped"


def _time_left(steps: Records) -> str:
    """By the pace of the last steps; the first one compiles."""
    recent = [r["seconds"] for r in steps[1:][-_RECENT:] if isinstance(r.get("seconds"), float)]
    n_left = steps[-1].get("n_steps", 0) - steps[-1]["step"] if steps else 0
    return span(fmean(recent) * n_left) if recent and n_left > 0 else ""


def _told(records: Records) -> dict[str, Any]:
    """What the run told of itself: its settings, its plan and its answers; the newest of each."""
    found: dict[str, Any] = {"settings": {}, "about": [], "prompt": "", "answers": []}
    for record in records:
        if record["event"] in ("run", "answers"):
            found |= {name: record[name] for name in found if name in record}
    return found
