"""Effects: what changes of a model make of a metric, cell by cell, and how all of them are run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from pyggml.errors import DataError, ShapeError
from pyggml.look.draw.grid import signed_map
from pyggml.model import Ids, Model
from pyggml.models.metric import Metric

Progress = Callable[[int, int], None]  # is told after each cell how many of how many are done


@dataclass(frozen=True, slots=True, eq=False)
class Effects:
    """What a metric is with each of many changes of a model.

    values   float64, an axis for each of `axes`; NaN where there is nothing to change
    axes     name of an axis, "layer", "token" or "head" → the numbers along it
    base     the metric without a change
    target   the metric of the other text, whose activations are patched in; NaN without one
    about    what was changed, in a few words
    """

    values: np.ndarray
    axes: Mapping[str, Sequence[int]]
    base: float
    target: float
    about: str

    @property
    def changes(self) -> np.ndarray:
        """By how much each change moves the metric."""
        return self.values - self.base

    @property
    def shares(self) -> np.ndarray:
        """How far each change moves it towards the other text's: 0 not at all, 1 all of the way."""
        return self.changes / (self.target - self.base)

    @property
    def shown(self) -> np.ndarray:
        """Shares, or changes where there is no other text."""
        return self.changes if np.isnan(self.target) else self.shares

    def top(self, n: int = 10) -> list[tuple[str, float]]:
        """The n largest effects by size, each with its name: "layer 3, head 1"."""
        values = self.shown.ravel()
        order = np.argsort(-np.abs(np.nan_to_num(values)), kind="stable")
        names = [*map(", ".join, product(*self._names()))]
        return [(names[i], float(values[i])) for i in order[:n] if not np.isnan(values[i])]

    def _names(self) -> list[list[str]]:
        return [[f"{axis} {i}" for i in numbers] for axis, numbers in self.axes.items()]

    def __str__(self) -> str:
        what = "change of the metric" if np.isnan(self.target) else "share of the way"
        ends = "" if np.isnan(self.target) else f", {self.target:.4f} of the other text"
        head = f"{self.about}: {what}; the metric is {self.base:.4f}{ends}"
        return "\n".join([head, *(f"{x:+9.4f}  {name}" for name, x in self.top())])

    def draw(self) -> str:
        """An SVG picture of `shown`: the last axis to the right, the others downwards."""
        *rows, columns = self._names()
        labels = [*map(", ".join, product(*rows))] if rows else [""]
        return signed_map(self.shown.reshape(len(labels), -1), labels, columns, self.about)

    def _repr_html_(self) -> str:
        return self.draw()


def metric_of(model: Model, metric: Metric, ids: Ids) -> float:
    """The metric of a text, with what traces change. ShapeError if it is not one number."""
    (value,) = run_cells(model, metric, ids, ["logits"], [{}])
    return float(value)


def run_cells(
    model: Model,
    metric: Metric,
    ids: Ids,
    patterns: Iterable[str],
    cells: Sequence[Mapping[str, Any]],
    progress: Progress | None = None,
) -> np.ndarray:
    """The metric (n,) float64 of a text with each of n cells' changes: see `Model.sweep`."""
    values = np.empty(len(cells))
    for i, value in enumerate(model.sweep(metric, ids, *dict.fromkeys(patterns))(cells)):
        if np.ndim(value):
            raise ShapeError(
                f"the metric has shape {np.shape(value)}, wanted one number: index it, or sum"
            )
        values[i] = value
        if progress is not None:
            progress(i + 1, len(cells))
    return values


def read_activations(model: Model, ids: Ids, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Activations of a text by name, float32, with what traces change."""
    with model.trace(*names) as t:
        model.logits(ids)
    return {name: t[name] for name in t.names}


def check_pair(model: Model, clean: Ids, corrupt: Ids) -> tuple[np.ndarray, np.ndarray]:
    """Two texts as arrays. DataError unless they have one length, as positions must match."""
    pair = model.check_tokens(clean), model.check_tokens(corrupt)
    if len(pair[0]) != len(pair[1]):
        raise DataError(
            f"clean has {len(pair[0])} tokens and corrupt {len(pair[1])}, wanted as many: "
            "positions are patched by their numbers"
        )
    return pair


def metrics_apart(model: Model, metric: Metric, base: Ids, target: Ids) -> tuple[float, float]:
    """The metric of two texts. DataError if it is the same of both."""
    ends = metric_of(model, metric, base), metric_of(model, metric, target)
    if ends[0] == ends[1]:
        raise DataError(
            f"the metric is {ends[0]:g} of both texts, so that no effect can be told from none"
        )
    return ends


def head_places(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Block and head of each head, of blocks with so many."""
    return [(i, h) for i, n in enumerate(counts) for h in range(n)]


def head_effects(
    counts: Sequence[int], values: np.ndarray, base: float, target: float, about: str
) -> Effects:
    """Effects (n_layer, n_head) of heads, from their values (n,) in the order of `head_places`."""
    table = np.full((len(counts), max(counts)), np.nan)
    for place, value in zip(head_places(counts), values, strict=True):
        table[place] = value
    axes = {"layer": range(len(counts)), "head": range(max(counts))}
    return Effects(table, axes, base, target, about)
