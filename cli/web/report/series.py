"""Columns of numbers for the charts, from the records of a run.

A chart is {"title", "note", "log", "x": steps, "series": [{"name", "role", "y": numbers or None}]}.
Role says how a line looks: "main", "faint", "second", "third", "points", "run0" to "run5", or a
number from 0 to 1, the depth of a block.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from statistics import fmean
from typing import Any

from pyggml.look.overview import Overview
from pyggml.lora import History
from pyggml.lora.record import overview_of

Chart = dict[str, Any]
Points = Mapping[int, float]  # number by step
Records = Sequence[Mapping[str, Any]]

MOST_LAID = 6  # runs laid over each other: as many colours as are told apart
_MOST_POINTS = 1000  # of a line: more than a screen shows
_SPREAD = 30  # greatest over least number, from which on an axis may be logarithmic
_SMOOTH, _LEAST = 20, 6  # a smooth line is the mean of one part in so many of all steps, if these


def charts_of(records: Records) -> list[Chart]:
    """Those for which the run has numbers."""
    steps, validations = _of(records, "step"), _of(records, "validation")
    losses = [r for r in validations if "answers" not in r]  # of others, rewards with their sign
    experts = [r | r["experts"] for r in steps if isinstance(r.get("experts"), dict)]
    both = [
        [r | r["classes"] for r in each if isinstance(r.get("classes"), dict)]
        for each in (steps, validations)
    ]
    charts = [
        _learning_chart("Loss", "", _points(steps, "loss"), _points(losses, "loss")),
        *_answer_charts(steps, validations),
        _learning_chart(
            *("Token accuracy", "share of learned tokens that had the highest probability"),
            *(_points(records, "token_accuracy") for records in (steps, validations)),
        ),
        *(
            _learning_chart(title, "of texts' classes", *(_points(e, name) for e in both))
            for title, name in (("Accuracy", "accuracy"), ("F1, the mean of classes", "macro_f1"))
        ),
        _line_chart("Gradient norm", "before clipping", _points(steps, "grad_norm"), log=True),
        _layer_chart(overview_of(records)),
        *_reward_charts([r | r["rewards"] for r in steps if isinstance(r.get("rewards"), dict)]),
        _line_chart("Busiest expert", "times an equal share", _points(experts, "busiest")),
        _line_chart("Balance loss", "of the routers", _points(experts, "balance_loss")),
        _line_chart("Learning rate", "", _points(steps, "lr")),
        _line_chart("Speed", "trained tokens a second", _points(steps, "tokens_per_second")),
    ]
    return [chart for chart in charts if chart["series"]]


def overlay(runs: Mapping[str, Records]) -> list[Chart]:
    """Charts with a line for each run, by name -> records: loss, validation, accuracy, rate.

    Lines are smooth where steps are noisy; the role of run i is "run0", "run1", ….
    """
    events = {name: [_of(rs, "step"), _of(rs, "validation")] for name, rs in runs.items()}

    def chart(title: str, note: str, field: str, part: int = 0, smooth: bool = False) -> Chart:
        lines = []
        for i, (name, records) in enumerate(events.items()):
            points = _points(records[part], field)
            lines.append((name, f"run{i}", _smooth(points) if smooth else points))
        return _chart(title, note, lines)

    charts = [
        chart("Loss", "mean of the last steps at each", "loss", smooth=True),
        chart("Validation loss", "", "loss", part=1),
        chart("Token accuracy", "mean of the last steps at each", "token_accuracy", smooth=True),
        chart("Learning rate", "", "lr"),
    ]
    return [c for c in charts if c["series"]]


def losses_of(records: Records) -> History:
    """The losses of a run's steps, as far as they are numbers."""
    losses = (r.get("loss") for r in _of(records, "step"))
    return History(array("d", (x for x in losses if isinstance(x, int | float))))


def final_and_best(records: Records) -> tuple[float | None, float | None, bool]:
    """The loss at the end of a run, as its card has it; the best loss, and whether that one is of
    validation: else it is the lowest of a line that is as smooth. None where there is no number."""
    history, steps = losses_of(records), _points(_of(records, "step"), "loss")
    smooth = _moving_mean(steps, history.n_averaged) if steps else {}
    held_out = _points(_of(records, "validation"), "loss")
    final = history.ends()[1] if history.losses else None
    best = min(held_out.values(), default=None) if held_out else min(smooth.values(), default=None)
    return final if final is None or isfinite(final) else None, best, bool(held_out)


def _of(records: Iterable[Mapping[str, Any]], event: str) -> list[Mapping[str, Any]]:
    return [r for r in records if r["event"] == event]


def _learning_chart(title: str, note: str, steps: Points, validations: Points) -> Chart:
    window = _window(len(steps))
    lines = [("each step", "faint" if window > 1 else "main", steps)]
    if window > 1:
        lines.append((f"mean of {window} steps", "main", _smooth(steps)))
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


def _reward_charts(steps: Records) -> list[Chart]:
    """Of a preference run."""
    margins = [
        ("margin", "main", _points(steps, "margin")),
        ("chosen", "second", _points(steps, "chosen")),
        ("rejected", "third", _points(steps, "rejected")),
    ]
    accuracy = _line_chart("Reward accuracy", "share of pairs", _points(steps, "accuracy"))
    return [_chart("Rewards", "", margins), accuracy]


def _answer_charts(steps: Records, validations: Records) -> list[Chart]:
    """Of a run that learns from what sampled answers earn."""
    own, held_out = (
        [r | r["answers"] for r in records if isinstance(r.get("answers"), dict)]
        for records in (steps, validations)
    )
    about = [(r["step"], r.get("sampled")) for r in steps]
    earned = [{**_rewards_in(of_step), "step": step} for step, of_step in about]
    names = dict.fromkeys(name for r in earned for name in r if name != "step")
    last = max(len(names) - 1, 1)
    each = [(name, i / last, _smooth(_points(earned, name))) for i, name in enumerate(names)]
    shares = [
        ("cut answers", "main", _smooth(_points(own, "cut"))),
        ("groups that earn alike", "second", _smooth(_points(own, "alike"))),
        ("ratios that are clipped", "third", _smooth(_points(own, "clipped"))),
    ]
    return [
        _learning_chart("Reward", "", _points(own, "reward"), _points(held_out, "reward")),
        _chart("Reward by function", "without weights", each if len(each) > 1 else ()),
        _line_chart("Answer length", "tokens", _points(own, "length")),
        _chart("Answers", "shares of a step", shares),
    ]


def _rewards_in(sampled: Any) -> Mapping[str, Any]:
    rewards = sampled.get("rewards") if isinstance(sampled, dict) else None
    return rewards if isinstance(rewards, dict) else {}


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


def _window(n: int) -> int:
    """Steps that a smooth line's number is the mean of, of a run of n."""
    return max(n // _SMOOTH, 2) if n >= _LEAST else 1


def _smooth(points: Points) -> Points:
    window = _window(len(points))
    return _moving_mean(points, window) if window > 1 else points


def _moving_mean(points: Points, window: int) -> Points:
    """The mean of the last `window` steps at each."""
    steps = sorted(points)
    total, means = 0.0, {}
    for i, step in enumerate(steps):
        total += points[step] - (points[steps[i - window]] if i >= window else 0.0)
        if i >= window - 1:
            means[step] = round(total / window, 12)  # what is left of a sum of zeros is 0
    return means
