"""A folder of runs: what `pyggml-finetune -o FOLDER/adapter.gguf` wrote there so far.

A run is named by its adapter. While it is under way it holds its lock and adds lines to its
metrics; a half-written last line is left out until it is whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from pyggml import gguf
from pyggml.cli.commands.view.queries import brief
from pyggml.cli.terminal.show import printable, size, span
from pyggml.cli.web.errors import ApiError
from pyggml.cli.web.report.data_card import data_card
from pyggml.cli.web.report.run_page import facts
from pyggml.cli.web.report.series import (
    MOST_LAID,
    Chart,
    Records,
    charts_of,
    final_and_best,
    overlay,
)
from pyggml.errors import ConfigError, PyggmlError, cause_of
from pyggml.files.json_text import finite
from pyggml.look.draw import heat
from pyggml.look.overview import Overview, cell_of, findings
from pyggml.lora.record import metrics_beside, overview_of, read_records
from pyggml.lora.trainer.lock import is_held
from pyggml.lora.trainer.reports import History, ValidationReport

_METRICS, _OLD = ".metrics.jsonl", ".metrics.old.jsonl"
_MOST_RUNS, _MOST_BYTES = 200, 1 << 28
_MOST_FINDINGS = 8
_SAMPLE = 300  # characters of a text to begin with
_RECENT = 20  # steps that the time left is judged by
COLUMNS = ("state", "steps", "final loss", "best loss", "lr", "rank", "time")


class Runs:
    """The runs of a folder. Raises ConfigError if it is none."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            fault = "is no folder" if folder.exists() else "does not exist"
            raise ConfigError(f"{folder}: {fault}, wanted the folder of a run's adapter")
        self.folder = folder
        self._snapshots: dict[str, _Snapshot] = {}
        self._kinds: dict[str, tuple[str, str]] = {}  # name -> version of its files, kind

    def names(self) -> list[str]:
        """The runs, those with the newest lines first. Raises ApiError if the folder is gone."""
        try:
            files = list(self.folder.iterdir())
        except OSError as error:
            raise ApiError(410, f"{self.folder}: cannot be read: {cause_of(error)}") from None
        changed: dict[str, float] = {}
        for path in files:
            if not path.is_file():  # a folder, or a pipe that would block
                continue
            if path.name.endswith(_METRICS) and not path.name.endswith(_OLD):
                changed[path.name.removesuffix(_METRICS)] = _mtime(path)
            elif path.name.startswith(".") and path.name.endswith(".gguf.lock"):
                changed.setdefault(path.name[1:].removesuffix(".gguf.lock"), _mtime(path))
        return sorted(changed, key=changed.__getitem__, reverse=True)[:_MOST_RUNS]

    def output(self, name: str) -> Path:
        """The adapter of a run, which may not be written yet. Raises ApiError if there is no such
        run."""
        if name not in self.names():
            raise ApiError(404, f"the folder has no run {brief(name)}", "name")
        return self._file(name)

    def summaries(self) -> list[dict[str, Any]]:
        """Name, state, version and kind of every run; the version changes with its files."""
        return [
            {
                "name": name,
                "running": is_held(self._file(name)),
                "version": _version(self._file(name)),
                "kind": self.kind(name),
            }
            for name in self.names()
        ]

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.gguf"

    def kind(self, name: str) -> str:
        """What a run has written: "adapter", a whole "model", or "": nothing that can be read."""
        version = _version(self._file(name))
        if self._kinds.get(name, ("",))[0] != version:
            self._kinds[name] = version, _kind(self._file(name))
        return self._kinds[name][1]

    def model(self) -> Path | None:
        """The model of the newest run whose model is still there; None without one."""
        for name in self.names():
            try:
                named = _details(self._read(name).records)["settings"].get("model")
            except ApiError:  # it has just gone, or is too large
                continue
            if isinstance(named, str) and Path(named).is_file():
                return Path(named)
        return None

    def sample(self) -> str:
        """What the newest run with an answer was asked, and what it said last; "" without one."""
        for name in self.names():
            try:
                about = _details(self._read(name).records)
            except ApiError:  # it has just gone, or is too large
                continue
            if about["answers"]:
                return (about["prompt"] + about["answers"][-1][1])[:_SAMPLE]
        return ""

    def _read(self, name: str) -> _Snapshot:
        """The lines of a run's metrics that are whole. Raises ApiError."""
        output = self.output(name)
        path, version = metrics_beside(output), _version(output)
        if _n_bytes(path) > _MOST_BYTES:
            raise ApiError(413, f"{path.name} is larger than {size(_MOST_BYTES)}")
        snapshot = self._snapshots.get(name)
        if snapshot is None or snapshot.version != version:
            snapshot = self._snapshots[name] = _Snapshot(version, list(read_records(path)))
        return snapshot

    def table(self) -> dict[str, Any]:
        """The runs as rows: columns with a name each, cells as {"value": to sort by, "text": to
        show}. A run whose records make no sense has no numbers."""
        rows = []
        for name in self.names():
            try:
                cells = _cells(self._read(name).records, is_held(self._file(name)))
            except (ApiError, ArithmeticError, TypeError, ValueError):
                cells = [_cell(None, "")] * len(COLUMNS)
            rows.append({"name": name, "cells": cells})
        return {"columns": COLUMNS, "rows": rows}

    def overlay(self, names: Sequence[str]) -> list[Chart]:
        """Charts with a line for each of these runs. Raises ApiError for a name that is none, for
        too many, and for records of no run."""
        if len(names) > MOST_LAID:
            raise ApiError(400, f"{len(names)} runs, wanted at most {MOST_LAID}", "names")
        try:
            return overlay({name: self._read(name).records for name in names})
        except (ArithmeticError, TypeError, ValueError) as error:
            raise ApiError(422, f"the records of these runs make no sense: {error}") from None

    def describe(self, name: str) -> dict[str, Any]:
        """A run as the page shows it. Raises ApiError if there is none, and for numbers in its
        records that no run writes."""
        try:
            return self._describe(name)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise ApiError(422, f"the records of this run make no sense: {error}") from None

    def _describe(self, name: str) -> dict[str, Any]:
        output = self.output(name)
        running, snapshot = is_held(output), self._read(name)
        records, overview = snapshot.records, snapshot.overview
        steps = [r for r in records if r["event"] == "step"]
        last = steps[-1] if steps else {}
        return {
            "name": printable(name),
            "version": snapshot.version,
            "state": _state(running, last, records),
            "step": last.get("step", 0),
            "n_steps": _n_steps(last),
            "left": _time_left(steps) if running else "",
            "facts": facts(records) if steps else [],
            "charts": charts_of(records),
            "measured": [] if overview is None else overview.steps,
            "adapter": size(_n_bytes(output)) if output.is_file() else "",
            "data": data_card(records),
            **_details(records),
        }

    def gradients(self, name: str, kind: str, step: int) -> dict[str, Any]:
        """The heat map of a run's gradients at one of the steps that were measured, the small ones
        of several steps, and what is wrong, in sentences. Raises ApiError."""
        o = self._read(name).overview
        if o is None or step not in o.steps:
            raise ApiError(404, f"the gradients of step {step} were not measured", "step")
        if kind not in heat.KINDS:
            raise ApiError(400, f"kind is {brief(kind)}, wanted {', '.join(heat.KINDS)}", "kind")
        return {
            "kinds": {kind: heat.KINDS[kind].title for kind in heat.kinds_of(o)},
            "map": heat.heat_map(o, kind, step),
            "over": heat.heat_steps(o, kind) if len(o.steps) > 1 else "",
            "findings": findings(o)[:_MOST_FINDINGS],
        }

    def norms(self, name: str, tensor: str) -> list[Chart]:
        """The chart of the gradients of a tensor's update over steps, if any were measured."""
        o = self._read(name).overview
        if o is None:
            return []
        layer, (module, _) = cell_of(tensor)
        lines = [
            (str(column), "main" if column.factor != "B" else "second", o.norms[:, i, c])
            for i, block in enumerate(o.layers)
            for c, column in enumerate(o.columns)
            if block == layer and column.module == module and o.there[i, c]
        ]
        series = [{"name": line, "role": role, "y": [*map(finite, y)]} for line, role, y in lines]
        title, note = "Gradient norm", "at the steps that were measured, before clipping"
        chart = {"title": title, "note": note, "log": False, "x": o.steps, "series": series}
        return [chart] if lines else []


@dataclass(frozen=True)
class _Snapshot:
    """What a run's metrics held when its files had this version."""

    version: str
    records: Records

    @cached_property
    def overview(self) -> Overview | None:
        return overview_of(self.records)


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # it has just gone
        return 0.0


def _n_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _version(output: Path) -> str:
    """A word that changes when a file of the run does."""
    stamps = []
    for path in (metrics_beside(output), output):
        try:
            stat = path.stat()
            stamps.append(f"{stat.st_ino:x}.{stat.st_size:x}.{stat.st_mtime_ns:x}")
        except OSError:
            stamps.append("")
    return "-".join(stamps)


def _cells(records: Records, running: bool) -> list[dict[str, Any]]:
    """The cells of a run, one for each of COLUMNS."""
    steps = [r for r in records if r["event"] == "step"]
    last, settings = (steps[-1] if steps else {}), _details(records)["settings"]
    n, n_steps = last.get("step", 0), _n_steps(last)
    final, best, is_held_out = final_and_best(records)
    seconds = fsum(r["seconds"] for r in steps if isinstance(r.get("seconds"), int | float))
    state = _state(running, last, records)
    where = " in validation" if is_held_out else " (mean)"
    return [
        _cell(state, state),
        _cell(n, f"{n:,} of {n_steps:,}" if n_steps else f"{n:,}"),
        _cell(final, "" if final is None else f"{final:.4f}"),
        _cell(best, "" if best is None else f"{best:.4f}{where}"),
        *(_cell(*_number_of(settings.get(name))) for name in ("lr", "lora_rank")),
        _cell(seconds, span(seconds) if seconds else ""),
    ]


def _number_of(value: Any) -> tuple[float | None, str]:
    """A setting that is a number, and its text; nothing of others, as a run without an adapter."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (value, f"{value:g}") if is_number else (None, "")


def _cell(value: float | str | None, text: str) -> dict[str, Any]:
    return {"value": value, "text": text}


def _kind(output: Path) -> str:
    try:
        with gguf.open(output) as file:
            return "adapter" if file.word("general.type") == "adapter" else "model"
    except PyggmlError:
        return ""


def _state(running: bool, last: Mapping[str, Any], records: Records) -> str:
    if running:
        return "running" if last else "starting"
    if not last:
        return "empty"
    if last["step"] == _n_steps(last):
        return "finished"
    return "ended early" if _has_stalled(records) else "stopped"


def _has_stalled(records: Records) -> bool:
    """Whether the run ended by itself, by its --patience."""
    patience = _details(records)["settings"].get("patience")
    losses = [r.get("loss") for r in records if r["event"] == "validation"]
    numbers = [x for x in losses if isinstance(x, int | float)]
    if type(patience) is not int or len(numbers) != len(losses):
        return False
    validations = [ValidationReport(i, x, 0) for i, x in enumerate(numbers)]
    return History(validations=validations).has_stalled(patience)


def _n_steps(last: Mapping[str, Any]) -> int:
    """0 if the record does not tell."""
    n = last.get("n_steps")
    return n if type(n) is int else 0


def _time_left(steps: Records) -> str:
    """By the pace of the last steps; the first one compiles."""
    recent = [r["seconds"] for r in steps[1:][-_RECENT:] if isinstance(r.get("seconds"), float)]
    n_left = _n_steps(steps[-1]) - steps[-1]["step"] if steps else 0
    return span(fmean(recent) * n_left) if recent and n_left > 0 else ""


def _details(records: Records) -> dict[str, Any]:
    """What the run told of itself: its settings, its plan and its answers; the newest of each."""
    about: dict[str, Any] = {"settings": {}, "about": [], "prompt": "", "answers": []}
    for record in records:
        if record["event"] == "run":
            settings = record.get("settings")
            pairs = settings.items() if isinstance(settings, dict) else ()
            about["settings"] = {name: _setting(value) for name, value in pairs}
            about["about"] = _pairs(record.get("about"))
        elif record["event"] == "answers":
            about["prompt"] = str(record.get("prompt", ""))
            about["answers"] = _pairs(record.get("answers"))
    return about


def _setting(value: Any) -> Any:
    """A number, a yes or a no; else a word."""
    is_number = isinstance(value, int) or (isinstance(value, float) and isfinite(value))
    return value if is_number else printable(str(value))


def _pairs(given: Any) -> list[list[str]]:
    """Rows of two words each; others, of a stranger's file, are left out."""
    rows = given if isinstance(given, list) else []
    return [
        row
        for row in rows
        if isinstance(row, list) and len(row) == 2 and all(isinstance(w, str) for w in row)
    ]
