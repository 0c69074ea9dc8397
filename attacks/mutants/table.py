"""Which tests run a line: each test function is run once, alone, and watched."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attacks.mutants.changes import ROOT, Mutant
from attacks.mutants.tests import Plan
from attacks.mutants.trial import Collected, Trace


def digest(files: Iterable[str]) -> str:
    """Of these files' bytes and names."""
    whole = hashlib.sha256()
    for file in sorted(files):
        whole.update(f"{file} ".encode() + hashlib.sha256((ROOT / file).read_bytes()).digest())
    return whole.hexdigest()[:16]


class Table:
    """Test function -> its seconds and lines, kept in a file, a line of JSON each.

    What a changed source or test ran before is measured anew.
    """

    def __init__(self, path: Path, files: Sequence[str]) -> None:
        self._path, self._files = path, files
        self._stamp = digest(files)
        self._rows: dict[str, dict[str, Any]] = {}
        self._imported: dict[str, list[int]] = {}
        for line in path.read_text("utf-8").splitlines() if path.exists() else ():
            row = json.loads(line)
            if row["stamp"] == self._stamp_of(row["test"]):
                self._rows[row["test"]] = row

    def _stamp_of(self, test: str) -> str:
        file = test.partition("::")[0]
        return self._stamp + digest([file] if (ROOT / file).is_file() else [])

    def fill(self, plan: Plan) -> None:
        """Run the tests that it lacks."""
        collected = Collected(plan, self._files)
        self._imported = {file: sorted(lines) for file, lines in collected.imported.items()}
        missing = [t for t in collected.tests if t not in self._rows]
        with self._path.open("a", encoding="utf-8") as out:
            for i, test in enumerate(missing):
                ended = collected.do(Trace(test, self._files))
                told = next((t for t in ended.told if "lines" in t), {"failed": ended.why})
                row = {"test": test, "stamp": self._stamp_of(test), **told}
                self._rows[test] = row
                out.write(json.dumps(row) + "\n")
                out.flush()
                print(f"{i + 1}/{len(missing)} {test} {told.get('seconds', 0):.1f} s", flush=True)
        self._rows = {t: self._rows[t] for t in collected.tests}
        collected.end()
        for test, row in self._rows.items():
            if row["failed"]:
                print(f"{test} fails without a mutant ({row['failed']}): it is left out")

    def is_imported(self, mutant: Mutant) -> bool:
        """Whether a mutant runs before any test does."""
        first, last = mutant.lines
        ran = self._imported.get(mutant.file, [])
        return not mutant.in_function or any(first <= line <= last for line in ran)

    def tests_of(self, mutant: Mutant) -> dict[str, float]:
        """The tests that run its statement, the quickest first; for what runs before any test,
        those that run anything of its file after them."""
        first, last = mutant.lines
        ran = {t: r["lines"].get(mutant.file) for t, r in self._rows.items() if not r["failed"]}
        near = {t for t, lines in ran.items() if any(first <= i <= last for i in lines or ())}
        if self.is_imported(mutant):
            near |= {t for t, lines in ran.items() if lines}
        return {t: self._rows[t]["seconds"] for t in sorted(near, key=self._seconds)}

    def _seconds(self, test: str) -> float:
        return self._rows[test]["seconds"]
