"""A report as a record: a dictionary of plain values, as it stands in a line of JSON.

{"event": "step", "step": 1, "loss": 2.1, …}    the fields of the report by their names
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil

from pyggml.lora.trainer.reports import CheckpointReport, Report, StepReport, ValidationReport

Record = dict[str, Any]


def record_of(report: Report) -> Record:
    """The record of a report; what it has none of is left out."""
    name = type(report).__name__.removesuffix("Report").lower()
    plain = (f.name for f in fields(report) if f.name not in ("tally", "experts"))
    record = {"event": name} | {name: _plain(getattr(report, name)) for name in plain}
    if not isinstance(report, CheckpointReport) and report.tally is not None:
        is_whole = isinstance(report, ValidationReport)
        record |= report.tally.whole_figures() if is_whole else report.tally.figures()
    if not isinstance(report, CheckpointReport) and report.experts is not None:
        record["experts"] = report.experts.figures(whole=isinstance(report, ValidationReport))
    if isinstance(report, StepReport):
        record["tokens_per_second"] = report.tokens_per_second
        # What of this process lies in RAM, pages of mapped weights included.
        record["memory_bytes"] = psutil.Process().memory_info().rss
    return {name: value for name, value in record.items() if value is not None}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def numbers_of(record: Record) -> dict[str, float]:
    """The numbers of a record by name, those inside it too: rewards.margin."""
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            numbers |= {f"{name}.{inner}": x for inner, x in numbers_of(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = float(value)
    return numbers
