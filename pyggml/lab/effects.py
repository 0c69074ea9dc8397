"""Effects: what changes of a model make of a metric, cell by cell, and how all of them are run.

`of_pairs` puts a question of a pair of texts, clean and corrupt, to lists of both too.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import product, zip_longest
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

import numpy as np

from pyggml.errors import DataError, ShapeError
from pyggml.look.draw.grid import signed_map
from pyggml.look.lens import as_texts
from pyggml.model import Model
from pyggml.models.metric import Metric
from pyggml.models.sweep import Cell
from pyggml.models.texts import Ids, is_several

Progress = Callable[[int, int], None]  # is told after each cell how many of how many are done
Metrics = Metric | Sequence[Metric]  # of all texts one, or of each
Texts = Sequence[np.ndarray]
P = ParamSpec("P")
T = TypeVar("T")


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
        order = np.argsort(-np.nan_to_num(np.abs(values), nan=-1.0), kind="stable")
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


class OfPairs(Protocol[P, T]):
    """A question that takes a clean and a corrupt text, or lists of both, pair by pair, and then
    gives a list of answers."""

    @overload
    def __call__(
        self, model: Model, clean: Ids, corrupt: Ids, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...

    @overload
    def __call__(
        self,
        model: Model,
        clean: Sequence[Ids],
        corrupt: Sequence[Ids],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]: ...


def of_pairs(question: Callable[Concatenate[Model, Texts, Texts, P], list[T]]) -> OfPairs[P, T]:
    """A question that is put to several pairs of texts, put to one too. DataError for pairs that
    are none."""

    @wraps(question)
    def ask(model: Model, clean: Any, corrupt: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        answers = question(model, *_check_pairs(model, clean, corrupt), *args, **kwargs)
        return answers if is_several(clean) else answers[0]

    return ask


def _check_pairs(model: Model, clean: Any, corrupt: Any) -> tuple[Texts, Texts]:
    """The texts of pairs as arrays. DataError unless both have as many texts, and the texts of each
    pair one length, as positions must match."""
    cleans, corrupts = as_texts(clean, "clean"), as_texts(corrupt, "corrupt")
    if is_several(clean) != is_several(corrupt) or len(cleans) != len(corrupts):
        counts = [len(x) if is_several(x) else "one" for x in (clean, corrupt)]
        raise DataError(
            f"clean is {counts[0]} and corrupt {counts[1]}, wanted two texts, or two lists of as "
            "many"
        )
    arrays = [model.check_tokens(x) for x in cleans], [model.check_tokens(x) for x in corrupts]
    for i, (a, b) in enumerate(zip(*arrays, strict=True)):
        if len(a) != len(b):
            which = f"[{i}]" if is_several(clean) else ""
            raise DataError(
                f"clean{which} has {len(a)} tokens and corrupt{which} {len(b)}, wanted as many: "
                "positions are patched by their numbers"
            )
    return arrays


def metric_of(model: Model, metric: Metrics, texts: Sequence[Ids]) -> list[float]:
    """The metric of each text, with what traces change. ShapeError if it is not one number."""
    values = run_cells(model, metric, texts, ["logits"], [[{}]] * len(texts))
    return [float(value) for (value,) in values]


def run_cells(
    model: Model,
    metric: Metrics,
    texts: Sequence[Ids],
    patterns: Iterable[str],
    cells: Sequence[Sequence[Cell]],
    progress: Progress | None = None,
) -> list[np.ndarray]:
    """The metric (n,) float64 of each text with each of its own n cells' changes, in one sweep.

    Texts go side by side; what has fewer cells than others is unchanged meanwhile.
    """
    steps = [*zip_longest(*cells, fillvalue={})]
    values = np.empty((len(steps), len(texts)))
    for i, losses in enumerate(model.sweep(metric, texts, *dict.fromkeys(patterns))(steps)):
        if shapes := [np.shape(value) for value in losses if np.ndim(value)]:
            raise ShapeError(
                f"the metric has shape {shapes[0]}, wanted one number: index it, or sum"
            )
        values[i] = losses
        if progress is not None:
            progress(i + 1, len(steps))
    return [column[: len(own)] for column, own in zip(values.T, cells, strict=True)]


def read_activations(
    model: Model, texts: Sequence[Ids], names: Iterable[str]
) -> list[dict[str, np.ndarray]]:
    """Activations of each text by name, float32, with what traces change."""
    with model.trace(*names) as t:
        model.logits(texts)
    return [{name: t[name][i] for name in t.names} for i in range(len(texts))]


def metrics_apart(
    model: Model, metric: Metrics, bases: Sequence[Ids], targets: Sequence[Ids]
) -> list[tuple[float, float]]:
    """The metric of both texts of each pair. DataError if it is the same of both."""
    ends = [metric_of(model, metric, texts) for texts in (bases, targets)]
    if alike := [base for base, target in zip(*ends, strict=True) if base == target]:
        raise DataError(
            f"the metric is {alike[0]:g} of both texts, so that no effect can be told from none"
        )
    return [*zip(*ends, strict=True)]


def head_places(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Block and head of each head, of blocks with so many."""
    return [(i, h) for i, n in enumerate(counts) for h in range(n)]


def head_effects(
    counts: Sequence[int],
    of_cells: Sequence[np.ndarray],
    ends: Sequence[tuple[float, float]],
    about: str,
) -> list[Effects]:
    """Effects (n_layer, n_head) of heads in each text, from their values (n,) in the order of
    `head_places`, and its base and target."""
    axes = {"layer": range(len(counts)), "head": range(max(counts))}
    effects = []
    for values, pair in zip(of_cells, ends, strict=True):
        table = np.full((len(counts), max(counts)), np.nan)
        for place, value in zip(head_places(counts), values, strict=True):
            table[place] = value
        effects.append(Effects(table, axes, *pair, about))
    return effects
