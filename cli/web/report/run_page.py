"""The page of a run: a template filled with its numbers and texts, all in one file.

Charts are drawn by uPlot, which lies beside this file: 50 KB that need neither network nor another
package, and let the reader zoom and point. Plotly brings 4 MB, Vega a network or more, Matplotlib
50 MB of packages for pictures that answer no pointer and know one width and one scheme.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyggml.cli.terminal.progress import change
from pyggml.cli.terminal.samples import Reading
from pyggml.cli.terminal.show import size, span
from pyggml.cli.web import pages
from pyggml.cli.web.report import FIRST_WORDS
from pyggml.cli.web.report.data_card import data_card
from pyggml.cli.web.report.series import Records, charts_of, losses_of
from pyggml.look.draw import heat, tokens
from pyggml.look.overview import Overview, findings
from pyggml.lora.record import overview_of, read_records

_MOST_FINDINGS = 8
_MOST_SAMPLES = 10


@dataclass(frozen=True, slots=True)
class Page:
    """What the page shows beside the records of the run."""

    title: str
    about: Sequence[tuple[str, str]]  # what a run said of model, adapter, data, memory and steps
    settings: Mapping[str, Any]
    prompt: str = ""
    answers: Sequence[tuple[str, str]] = ()  # ("before", its text), ("after", …)
    readings: Sequence[Reading] = ()  # of a held-out text, before and after
    command: str = ""  # that made the run
    date: str = ""  # of its end


def write(path: Path, page: Page, metrics: Path) -> None:
    """Write the page of the run whose records are in this file. Raises PyggmlError if the disk
    refuses."""
    pages.write(path, render(page, list(read_records(metrics))))


def render(page: Page, records: Records) -> str:
    """The page as HTML."""
    overview = overview_of(records)
    return pages.render(
        *("pyggml.cli.web.report", "page.html"),
        styles=("uPlot.min.css", "page.css", "data_card.css"),
        scripts=("uPlot.iife.min.js", "ticks.js", "charts.js"),
        drawn=[heat.STYLE, tokens.STYLE],
        token_style=tokens.STYLE,
        first=FIRST_WORDS,
        title=page.title,
        page=page,
        head=_head(page),
        facts=facts(records),
        data=data_card(records),
        charts=charts_of(records),
        gradients=None if overview is None else _gradients(overview),
        experts=_experts(records),
        samples=_samples(records),
        tables=_tables(records),
        readings=[
            (r.label, r.table.loss, tokens.fragment(r.table, r.pieces)) for r in page.readings
        ],
    )


def _head(page: Page) -> list[tuple[str, str]]:
    """What the run is of: the first line that it said of its model and its data, and when."""
    rows = dict(page.about) | ({"date": page.date} if page.date else {})
    return [(name, rows[name].split("\n")[0]) for name in ("model", "data", "date") if name in rows]


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


def _experts(records: Records) -> list[str]:
    """Pictures of the load of a mixture's experts, at the first validation and at the last."""
    validations = [r for r in records if "load" in (r.get("experts") or {})]
    return [
        heat.heat_load(np.array(r["experts"]["load"]), f"load of experts, step {r['step']:,}")
        for r in (validations[:1] + validations[1:][-1:])
    ]


def _samples(records: Records) -> list[tuple[int, str, str, str]]:
    """Answers that were sampled on the way: step, prompt, answer, and what it earned."""
    steps = [(r["step"], r["sampled"]) for r in records if isinstance(r.get("sampled"), dict)]
    n = min(len(steps), _MOST_SAMPLES)
    samples = []
    for step, s in (steps[i * (len(steps) - 1) // max(n - 1, 1)] for i in range(n)):
        earned = s["earned"].items() if isinstance(s.get("earned"), dict) else ()
        said = ", ".join(f"{name} {x:.3g}" for name, x in earned if _is_number({"": x}, ""))
        samples.append((step, str(s.get("prompt", "")), str(s.get("answer", "")), said))
    return samples


def _tables(records: Records) -> list[tuple[str, list[list[Any]]]]:
    """What was measured of the result: a title, and rows, the first of which has the columns."""
    told = [(str(r.get("title", "")), r.get("rows")) for r in records if r["event"] == "table"]
    return [
        (title, rows)
        for title, rows in told
        if rows and isinstance(rows, list) and all(isinstance(cells, list) for cells in rows)
    ]


def facts(records: Records) -> list[tuple[str, str]]:
    """The run in a few numbers: name and value."""
    steps = [r for r in records if r["event"] == "step"]
    held_out = [r["loss"] for r in records if r["event"] == "validation" and _is_number(r, "loss")]
    numbers = [("steps", f"{len(steps):,}")]
    history = losses_of(records)
    if history.losses:
        numbers.append(("loss", change(history)))
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
