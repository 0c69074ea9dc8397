"""What became of each run of a sweep: beside its adapter, as a table, and as a page.

A run that is over leaves NAME.result.json: {"state": "finished", "why": ""}. All else is in its
metrics.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from urllib.parse import quote

from pyggml.cli.commands.sweep.lists import SweepRun
from pyggml.cli.terminal.lines import Line
from pyggml.cli.terminal.paths import beside
from pyggml.cli.terminal.show import span
from pyggml.cli.web import pages
from pyggml.cli.web.report import FIRST_WORDS
from pyggml.cli.web.report.series import MOST_LAID, Records, final_and_best, overlay
from pyggml.files import replacing
from pyggml.files.json_text import read_object
from pyggml.lora.record import metrics_beside, read_records
from pyggml.lora.trainer.lock import is_held

FINISHED, HOPELESS, FAILED = "finished", "ended early", "failed"
OVER = (FINISHED, HOPELESS, FAILED)
PAGE = "sweep.html"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Result:
    """A run and its figures; the loss is of what its file holds: in validation, where it has one.

    best: the lowest loss on the way
    """

    run: SweepRun
    state: str
    why: str
    loss: float | None
    best: float | None
    n_steps: int
    seconds: float


def note(run: SweepRun, state: str, why: str = "") -> None:
    """Write that a run is over. Raises PyggmlError if the disk refuses."""
    with replacing(_file(run)) as out:
        out.write(json.dumps({"state": state, "why": why}).encode())


def state_of(run: SweepRun) -> tuple[str, str]:
    """The state of a run, and why it failed."""
    about = read_object(_file(run), _MOST_BYTES)
    if about.get("state") in OVER:
        return about["state"], str(about.get("why", ""))
    if is_held(place_of(run)):
        return "running", ""
    return ("stopped" if metrics_beside(run.job.output).exists() else "waiting"), ""


def place_of(run: SweepRun) -> Path:
    """The path that a process holds while the run is its own."""
    return run.job.output.with_name(run.name)


def _file(run: SweepRun) -> Path:
    return beside(run.job.output, ".result.json")


def results_of(runs: Sequence[SweepRun]) -> list[Result]:
    """All runs, the best first; those without a loss last."""
    results = [_result(run, list(read_records(metrics_beside(run.job.output)))) for run in runs]
    return sorted(results, key=lambda r: (r.state == FAILED, r.loss is None, r.loss or 0.0))


def _result(run: SweepRun, records: Records) -> Result:
    state, why = state_of(run)
    final, best, is_held_out = final_and_best(records)
    held_out = [r["loss"] for r in records if r["event"] == "validation"]
    if is_held_out:
        final = best if run.job.train.keep_best else held_out[-1]
    steps = [r for r in records if r["event"] == "step"]
    seconds = fsum(r["seconds"] for r in steps if isinstance(r.get("seconds"), int | float))
    return Result(run, state, why, final, best, len(steps), seconds)


# -- shown --------------------------------------------------------------------------------------


def cells(results: Sequence[Result]) -> list[Line]:
    """The table: a head, and a line for each run, with the settings in which the runs differ."""
    names = [*results[0].run.varied]
    lines: list[Line] = [(*names, "loss", "best", "steps", "time", "")]
    for r in results:
        losses = ["" if x is None else f"{x:.4f}" for x in (r.loss, r.best)]
        time = span(r.seconds) if r.seconds else ""
        state = ": ".join(filter(None, [r.state, r.why]))
        lines.append((*r.run.values.values(), *losses, f"{r.n_steps:,}", time, state))
    return lines


def write_page(folder: Path, results: Sequence[Result], notes: Sequence[str] = ()) -> Path:
    """Write the page. Raises PyggmlError if the disk refuses."""
    path, (head, *lines) = folder / PAGE, cells(results)
    links = [_link(r.run, line) for r, line in zip(results, lines, strict=True)]
    best = [r for r in results if r.loss is not None][:MOST_LAID]
    records = {r.run.words: list(read_records(metrics_beside(r.run.job.output))) for r in best}
    page = pages.render(
        *("pyggml.cli.web.report", "sweep.html"),
        styles=("uPlot.min.css", "page.css", "sweep.css"),
        scripts=("uPlot.iife.min.js", "ticks.js", "charts.js"),
        first=FIRST_WORDS,
        title=folder.resolve().name,
        head=head,
        rows=links,
        notes=notes,
        n_laid=len(best),
        charts=overlay(records),
    )
    pages.write(path, page)
    return path


def _link(run: SweepRun, line: Sequence[str]) -> tuple[str, Sequence[str]]:
    """A line, and the page of its run, if that is written."""
    page = beside(run.job.output, ".html")
    return (quote(page.name) if page.exists() else ""), line
