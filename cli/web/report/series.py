"""Columns of numbers for the charts, from the records of a run.

A chart is {"title", "note", "log", "x": steps, "series": [{"name", "role", "y": numbers or None}]}.
Role says how a line looks: "main", "faint", "second", "third", "points", or a number from 0 to 1,
the depth of a block.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from statistics import fmean
from typing import Any

from pyggml.look.overview import Overview
from pyggml.lora.record import overview_of

Chart = dict[str, Any]
Points = Mapping[int, float]  # number by step

_MOST_POINTS = 1000  # of a line: more than a screen shows
_SPREAD = 30  # greatest over least number, from which on an axis may be logarithmic
_SMOOTH = 40  # a smooth line is the mean of one part in so many of all steps


def charts_of(records: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Those for which the run has numbers."""
    steps = [r for r in records if r["event"] == "step"]
    validations = [r for r in records if r["event"] == "validation"]
    charts = [
        _learning_chart("Loss", "", _points(steps, "loss"), _points(validations, "loss")),
        _learning_chart(
            *("Token accuracy", "share of learned tokens that had the highest probability"),
            *(_points(records, "token_accuracy") for records in (steps, validations)),
        ),
        _line_chart("Gradient norm", "before clipping", _points(steps, "grad_norm"), log=True),
        _layer_chart(overview_of(records)),
        *_reward_charts([r | r["rewards"] for r in steps if isinstance(r.get("rewards"), dict)]),
        _line_chart("Learning rate", "", _points(steps, "lr")),
        _line_chart("Speed", "trained tokens a second", _points(steps, "tokens_per_second")),
    ]
    return [chart for chart in charts if chart["series"]]


def _learning_chart(title: str, note: str, steps: Points, validations: Points) -> Chart:
    window = len(steps) // _SMOOTH
    lines = [("each step", "faint" if window > 1 else "main", steps)]
    if window > 1:
        lines.append((f"mean of {window} steps", "main", _moving_mean(steps, window)))
    lines.append(("validation", "points", validations))
    return _chart(title, note, lines)


def _layer_chart(overview: Overview | None) -> Chart:
    """A line for each layer, coloured by its depth."""
    lines: list[tuple[str, float, Points]] = []
    if overview is not None:
        last = max(len(overview.layers) - 1, 1)
        for i, name in enumerate(overview.layers):
            norms = overview.layer_norms[:, i].tolist()
            points = zip(overview.steps, norms, strict=True)
            lines.append((name, i / last, {step: x for step, x in points if isfinite(x)}))
    return _chart("Gradient norm by layer", "at some steps", lines, log=True)


def _reward_charts(steps: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Of a preference run."""
    margins = [
        ("margin", "main", _points(steps, "margin")),
        ("chosen", "second", _points(steps, "chosen")),
        ("rejected", "third", _points(steps, "rejected")),
    ]
    accuracy = _line_chart("Reward accuracy", "share of pairs", _points(steps, "accuracy"))
    return [_chart("Rewards", "", margins), accuracy]


def _line_chart(title: str, note: str, points: Points, log: bool = False) -> Chart:
    return _chart(title, note, [(title.lower(), "main", points)], log)


def _chart(
    title: str, note: str, lines: Sequence[tuple[str, str | float, Points]], log: bool = False
) -> Chart:
    drawn = [(name, role, _bin_means(points)) for name, role, points in lines if points]
    xs = sorted({x for _, _, points in drawn for x in points})
    series = [{"name": n, "role": role, "y": [p.get(x) for x in xs]} for n, role, p in drawn]
    ys = [y for _, _, points in drawn for y in points.values()]
    log = log and 0 < _SPREAD * min(ys, default=0.0) < max(ys, default=0.0)
    return {"title": title, "note": note, "log": log, "x": xs, "series": series}


def _points(records: Iterable[Mapping[str, Any]], name: str) -> dict[int, float]:
    values = ((r["step"], r.get(name)) for r in records)
    return {s: float(v) for s, v in values if isinstance(v, int | float) and isfinite(v)}


def _bin_means(points: Points) -> Points:
    """At most so many points that a browser is quick: means of steps next to each other."""
    width = -(-len(points) // _MOST_POINTS)
    steps = sorted(points)
    bins = [steps[i : i + width] for i in range(0, len(steps), max(width, 1))]
    return {b[len(b) // 2]: fmean(points[s] for s in b) for b in bins}


def _moving_mean(points: Points, window: int) -> Points:
    """The mean of the last `window` steps at each."""
    steps = sorted(points)
    total, means = 0.0, {}
    for i, step in enumerate(steps):
        total += points[step] - (points[steps[i - window]] if i >= window else 0.0)
        if i >= window - 1:
            means[step] = total / window
    return means
