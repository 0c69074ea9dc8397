"""adapter.metrics.jsonl: every report of a run as a line, from its first step on.

Beside the reports stand what the run is, told before its first step ("run"), and the answers before
and after it ("answers"). A line is on its way to the disk as soon as it is told, so a killed run
keeps its lines. A resumed run keeps those up to its checkpoint and goes on behind them. A new run
sets the file of an older one aside, as adapter.metrics.old.jsonl. Nothing is written before the
first step.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from pyggml.errors import PyggmlError
from pyggml.files import replacing
from pyggml.lora.record.records import Record, record_of
from pyggml.lora.trainer.reports import History

_MOST_CHARACTERS = 1 << 20  # of a line


class MetricsFile:
    """The records of a run that starts, or goes on, after `start` steps of this history.

    `fault` says why nothing is written any more, such as a full disk: no reason to end a run.
    """

    def __init__(self, path: Path, history: History, start: int) -> None:
        self.path, self.fault = path, ""
        self._start = start
        self._losses = history.losses[:start]
        self._validations = [v for v in history.validations if v.step <= start]
        self._waiting: list[Record] = []  # told before the first step
        self._file: TextIO | None = None

    def add(self, record: Record) -> None:
        if self.fault:
            return
        self._waiting.append(record)
        try:
            if self._file is None and record["event"] == "step":
                self._file = self._open_file()
            if self._file is not None:
                self._file.write("".join(map(_line, self._waiting)))
                self._file.flush()
                self._waiting.clear()
        except OSError as error:
            self.fault = f"{self.path}: cannot be written: {error.strerror or error}"
        except PyggmlError as error:
            self.fault = str(error)

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # it would write again what the disk refused
                self._file.close()

    def _open_file(self) -> TextIO:
        """The file with the lines of the steps before, ready for more."""
        kept = [r for r in read_records(self.path) if r["step"] <= self._start]
        losses = [r.get("loss") for r in kept if r["event"] == "step"]
        if not self._start or losses != list(self._losses):  # another run's, or its steps lack some
            if self.path.exists():
                self.path.replace(self.path.with_suffix(".old.jsonl"))
            kept = self._records_before()
        with replacing(self.path) as partial:
            partial.write_text("".join(map(_line, kept)), encoding="utf-8")
        return self.path.open("a", encoding="utf-8")

    def _records_before(self) -> list[Record]:
        """What the checkpoint knows of the steps before: their losses."""
        steps = [{"event": "step", "step": i, "loss": x} for i, x in enumerate(self._losses, 1)]
        held_out = [record_of(v) for v in self._validations]
        return sorted([*steps, *held_out], key=lambda r: r["step"])


def append(path: Path, record: Record) -> None:
    """Add a record to the file of a run that has ended. Raises PyggmlError if it cannot be written;
    without a file nothing is."""
    try:
        if path.is_file():
            with path.open("a", encoding="utf-8") as file:
                file.write(_line(record))
    except OSError as error:
        raise PyggmlError(f"{path}: cannot be written: {error.strerror or error}") from error


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file; lines that are none, such as a half-written last one, are left out."""
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except OSError:
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
