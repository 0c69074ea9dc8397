"""The page of a run: a template filled with its numbers and texts, all in one file.

Charts are drawn by uPlot, which lies beside this file: 50 KB that need neither network nor another
package, and let the reader zoom and point. Plotly brings 4 MB, Vega a network or more, Matplotlib
50 MB of packages for pictures that answer no pointer and know one width and one scheme.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyggml.cli.terminal.progress import change
from pyggml.cli.terminal.samples import Reading
from pyggml.cli.terminal.show import plural, size, span
from pyggml.cli.web import pages
from pyggml.cli.web.report import FIRST_WORDS
from pyggml.cli.web.report.series import charts_of
from pyggml.look.draw import heat, tokens
from pyggml.look.overview import Overview, findings
from pyggml.lora import History
from pyggml.lora.record import overview_of, read_records

_MOST_FINDINGS = 8
_MOST_ROWS = 5  # with the highest loss, and with the lowest


@dataclass(frozen=True, slots=True)
class Page:
    """What the page shows beside the records of the run."""

    title: str
    about: Sequence[tuple[str, str]]  # what a run said of model, adapter, data, memory and steps
    settings: Mapping[str, Any]
    prompt: str = ""
    answers: Sequence[tuple[str, str]] = ()  # ("before", its text), ("after", …)
    readings: Sequence[Reading] = ()  # of a held-out text, before and after


def write(path: Path, page: Page, metrics: Path) -> None:
    """Write the page of the run whose records are in this file. Raises PyggmlError if the disk
    refuses."""
    pages.write(path, render(page, list(read_records(metrics))))


def render(page: Page, records: Sequence[Mapping[str, Any]]) -> str:
    """The page as HTML."""
    overview = overview_of(records)
    return pages.render(
        *("pyggml.cli.web.report", "page.html"),
        styles=("uPlot.min.css", "page.css"),
        scripts=("uPlot.iife.min.js", "ticks.js", "charts.js"),
        drawn=[heat.STYLE, tokens.STYLE],
        token_style=tokens.STYLE,
        first=FIRST_WORDS,
        page=page,
        facts=facts(records),
        rows=rows_of(records),
        charts=charts_of(records),
        gradients=None if overview is None else _gradients(overview),
        readings=[
            (r.label, r.table.loss, tokens.fragment(r.table, r.pieces)) for r in page.readings
        ],
    )


def _gradients(o: Overview) -> dict[str, Any]:
    """What the page shows of the gradient overview."""
    problems, last = findings(o), o.at(o.steps[-1:])
    over_steps = [kind for kind in heat.kinds_of(o) if kind != "zeros" and len(o.steps) > 1]
    return {
        "n_steps": len(o.steps),
        "findings": problems[:_MOST_FINDINGS],
        "n_more": max(len(problems) - _MOST_FINDINGS, 0),
        "maps": [heat.heat_map(o, kind) for kind in heat.kinds_of(last)],
        "steps": [heat.heat_steps(o, kind) for kind in over_steps],
    }


def rows_of(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the page shows of the rows: lengths, scripts, findings, and those with the highest and
    the lowest loss; None of a run that has no report on them."""
    told = [r["data"] for r in records if r["event"] == "run" and isinstance(r.get("data"), dict)]
    if not told or not told[-1].get("lengths"):
        return None
    data = told[-1]
    about = []
    for name, what in (("lengths", "tokens of a row"), ("answers", "learned tokens")):
        least, half, most, longest = data[name]
        text = f"{least:,} to {longest:,}, half up to {half:,}, 9 of 10 up to {most:,}"
        about.append((what, text))
    scripts = [f"{name} {100 * share:.3g} %" for name, share in data["scripts"]]
    about.append(("scripts", ", ".join(scripts) or "no letters"))
    findings = [
        {"text": f"{plural(f['n'], 'row')} {f['what']}", "examples": f["examples"]}
        for f in data["findings"]
    ]
    losses = [row for r in records for row in r.get("rows", ())]
    return {
        "about": about,
        "findings": findings,
        "losses": _ends(losses),
        "n_losses": len(losses),
    }


def _ends(losses: Sequence[Sequence[Any]]) -> list[dict[str, str]]:
    """The rows with the highest losses and with the lowest, as words."""
    n = min(_MOST_ROWS, len(losses) // 2)
    rows = []
    for label, some in (("highest loss", losses[:n]), ("lowest loss", losses[len(losses) - n :])):
        for i, (text, *each) in enumerate(some):
            numbers = " → ".join("no number" if x is None else f"{x:.3f}" for x in each)
            rows.append({"label": "" if i else label, "text": text, "losses": numbers})
    return rows


def facts(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The run in a few numbers: name and value."""
    steps = [r for r in records if r["event"] == "step"]
    held_out = [r["loss"] for r in records if r["event"] == "validation" and _is_number(r, "loss")]
    numbers = [("steps", f"{len(steps):,}")]
    losses = [r["loss"] for r in steps if _is_number(r, "loss")]
    if losses:
        numbers.append(("loss", change(History(array("d", losses)))))
    if held_out:
        numbers.append(("validation", f"{held_out[0]:.4f} → {held_out[-1]:.4f}"))
    n_tokens = sum(r["n_tokens"] for r in steps if _is_number(r, "n_tokens"))
    seconds = sum(r["seconds"] for r in steps if _is_number(r, "seconds"))
    if n_tokens and seconds:
        numbers.append(("trained tokens", f"{n_tokens:,}"))
        numbers.append(("time in steps", span(seconds)))
        numbers.append(("tokens a second", f"{n_tokens / seconds:,.0f}"))
    memory = [r["memory_bytes"] for r in steps if _is_number(r, "memory_bytes")]
    if memory:
        numbers.append(("most memory", size(max(memory))))
    return numbers


def _is_number(record: Mapping[str, Any], name: str) -> bool:
    return isinstance(record.get(name), int | float)
