"""adapter.metrics.jsonl: every report of a run as a line, from its first step on.

Beside the reports stand what the run is, told before its first step ("run"), and the answers before
and after it ("answers"). A line is on its way to the disk as soon as it is told, so a killed run
keeps its lines. A resumed run keeps those up to its checkpoint and goes on behind them. A new run
sets the file of an older one aside, as adapter.metrics.old.jsonl. Nothing is written before the
first step.
"""

import io
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from pyggml.errors import PyggmlError, cause_of
from pyggml.files import open_regular, open_to_append, replacing
from pyggml.lora.record.records import Record, record_of
from pyggml.lora.trainer.reports import History

_FIRST_WORDS = b'{"event": "'
_MOST_CHARACTERS = 1 << 20  # of a line


class MetricsFile:
    """The records of a run that starts, or goes on, after `start` steps of this history.

    replaces: whether files that no run has written are replaced, too

    `fault` says why nothing is written any more, such as a full disk: no reason to end a run.
    """

    def __init__(self, path: Path, history: History, start: int, replaces: bool = False) -> None:
        self.path, self.fault = path, ""
        self._start, self._replaces = start, replaces
        self._losses = history.losses[:start]
        self._validations = [v for v in history.validations if v.step <= start]
        self._waiting: list[Record] = []  # told before the first step
        self._file: BinaryIO | None = None

    def add(self, record: Record) -> None:
        if self.fault:
            return
        self._waiting.append(record)
        try:
            if self._file is None and record["event"] == "step":
                self._file = self._open_file()
            if self._file is not None:
                self._file.write("".join(map(_line, self._waiting)).encode())
                self._file.flush()
                self._waiting.clear()
        except OSError as error:
            self.fault = f"{self.path}: cannot be written: {cause_of(error)}"
        except PyggmlError as error:
            self.fault = str(error)

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # it would write again what the disk refused
                self._file.close()

    def _open_file(self) -> BinaryIO:
        """The file with the lines of the steps before, ready for more."""
        kept = [r for r in read_records(self.path) if r["step"] <= self._start]
        losses = [r.get("loss") for r in kept if r["event"] == "step"]
        if not self._start or losses != list(self._losses):  # another run's, or its steps lack some
            _set_aside(self.path, self._replaces)
            kept = self._records_before()
        with replacing(self.path) as out:
            out.write("".join(map(_line, kept)).encode())
        return open_to_append(self.path)

    def _records_before(self) -> list[Record]:
        """What the checkpoint knows of the steps before: their losses."""
        steps = [{"event": "step", "step": i, "loss": x} for i, x in enumerate(self._losses, 1)]
        held_out = [record_of(v) for v in self._validations]
        return sorted([*steps, *held_out], key=lambda r: r["step"])


def _set_aside(path: Path, replaces: bool) -> None:
    """Keep the file of an older run as .old.jsonl. PyggmlError, and both stay, if either was not
    written by a run, unless such files are to be replaced."""
    old = path.with_suffix(".old.jsonl")
    for each in (path, old):
        if each.exists() and not are_records(each):
            if not replaces:
                fault = "was not written by a run, whose metrics would replace it"
                raise PyggmlError(f"{each}: {fault}")
            each.unlink()
    if path.exists():
        path.replace(old)


def are_records(path: Path) -> bool:
    """Whether a file begins as the records of a run do, or is empty, as one is for a moment."""
    try:
        with open_regular(path) as file:
            first = file.readline(_MOST_CHARACTERS)
        if not first.startswith(_FIRST_WORDS):
            return not first
        return not first.endswith(b"\n") or _is_known(json.loads(first))
    except (OSError, ValueError, RecursionError):
        return False


def append(path: Path, record: Record) -> None:
    """Add a record to the file of a run that has ended. Raises PyggmlError if it cannot be written;
    without a file nothing is."""
    try:
        if path.is_file():
            with open_to_append(path) as file:
                file.write(_line(record).encode())
    except OSError as error:
        raise PyggmlError(f"{path}: cannot be written: {cause_of(error)}") from error


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file; lines that are none, such as a half-written last one, are left out."""
    try:
        file = io.TextIOWrapper(open_regular(path), "utf-8", errors="replace")
    except (OSError, ValueError):
        return
    with file:
        while line := file.readline(_MOST_CHARACTERS):
            try:
                record = json.loads(line) if line.endswith("\n") else None
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and _is_known(record):
                yield record


def _is_known(record: Record) -> bool:
    return isinstance(record.get("event"), str) and type(record.get("step")) is int
