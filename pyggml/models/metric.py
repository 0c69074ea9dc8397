"""Metrics: numbers made of a model's activations by a function, and their gradients.

    def metric(t):                                  # a logit difference
        return t["logits"][-1, 7] - t["logits"][-1, 5]

The function takes `Activations` and gives one number, by the operators of values and by
`pyggml.functions`.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any

import numpy as np

from pyggml.backward import build_backward
from pyggml.backward.walk import tensors_that_reach
from pyggml.eager.activation import Activation, gradient
from pyggml.eager.value import Value
from pyggml.errors import ConfigError, NoGradientError, ShapeError, first_names, suggestion
from pyggml.graph import Graph
from pyggml.graph.tensor import Tensor
from pyggml.models.batch_rows import BatchRows
from pyggml.models.taps import Taps
from pyggml.ops import add, reshape, scale

Metric = Callable[["Activations"], Value]


class NotMade(Exception):
    """An activation is made on demand, and was not asked for when the graph was built: its name."""


class Activations(Mapping[str, Activation]):
    """The activations of a graph by name, as what traces change leaves them: of one text.

    cut   (name, tensor) → what of an activation is the text's; None: all
    """

    def __init__(self, taps: Taps, cut: Callable[[str, Tensor], Tensor] | None = None) -> None:
        self._tensors, self._names, self._cut = taps.read, taps.names, cut

    def __getitem__(self, name: str) -> Activation:
        """ConfigError for a name that no activation has; NotMade for one that is not made yet."""
        return self._own(name, self._tensor(name))

    def _tensor(self, name: str) -> Tensor:
        if name in self._tensors:
            return self._tensors[name]
        if name in self._names:
            raise NotMade(name)
        near = suggestion(str(name), self._names) or "; model.activations lists them"
        raise ConfigError(f"no activation is named {name}{near}")

    def _own(self, name: str, x: Tensor) -> Activation:
        return Activation(x if self._cut is None else self._cut(name, x))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def grad(self, metric: Metric, name: str) -> Activation:
        """d(metric)/d(activation), for a metric of gradients: a second derivative.

        Raises NoGradientError, naming the op, where its gradient has none itself.
        """
        g = gradient(self.number(metric), Activation(self._tensor(name)))
        return self._own(name, g.node)

    def number(self, metric: Metric) -> Activation:
        """The metric of these activations. Raises ShapeError if it is not one number."""
        y = self.numbers(metric)
        if y.size != 1:
            raise ShapeError(f"the metric has shape {y.shape}, wanted one number: index it, or sum")
        return y

    def numbers(self, metric: Metric) -> Activation:
        """The same of any shape."""
        y = metric(self)
        if not isinstance(y, Activation):
            raise ShapeError(
                f"the metric gave {y!r:.60}, wanted a number made of activations, such as "
                't["logits"][-1, 5]'
            )
        return y


@dataclass(frozen=True, slots=True, eq=False)
class Gradients(Mapping[str, np.ndarray]):
    """d(metric)/d(tensor) by name, float32, of the tensors' shapes.

    metric   the number itself
    at       the activations among them, where the gradient was taken
    """

    metric: float
    at: Mapping[str, np.ndarray]
    _arrays: Mapping[str, np.ndarray]

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._arrays:
            raise KeyError(f"{name} is none of {first_names([*self._arrays], 3)}")
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        names = first_names([*self._arrays], 3)
        return f"<Gradients of {self.metric:g} by {names}>"


def choose(patterns: Sequence[str], *kinds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that patterns name, of the first kind that has some for each.

    Raises ConfigError for a pattern that names nothing.
    """
    chosen: dict[str, Tensor] = {}
    for pattern in patterns:
        fits = ({n: t for n, t in kind.items() if fnmatchcase(n, pattern)} for kind in kinds)
        matches = next(filter(None, fits), None)
        if matches is None:
            near = suggestion(pattern, [name for kind in kinds for name in kind])
            raise ConfigError(f"no activation, adapter tensor or weight is named {pattern}{near}")
        chosen |= matches
    return chosen


def metrics_of(metric: Metric | Sequence[Metric], batch: BatchRows | None) -> Sequence[Metric]:
    """A metric for each text. Raises ConfigError for what is no function, or no list of as many."""
    n, several = batch.n if batch else 1, not callable(metric)
    metrics = [*metric] if isinstance(metric, Sequence) else [metric] * n
    if not all(map(callable, metrics)) or (several and batch is None):
        raise ConfigError(
            f"the metric is {metric!r:.60}, wanted a function of activations"
            + (", or one for each text" if batch else "")
        )
    if len(metrics) != n:
        raise ConfigError(
            f"there are {len(metrics)} metrics, wanted one, or one for each of {n} texts"
        )
    return metrics


def texts_of(taps: Taps, batch: BatchRows | None) -> list[Activations]:
    """The activations of a graph, text by text."""
    if batch is None:
        return [Activations(taps)]
    pieces: dict[Hashable, Tensor] = {}

    def once(key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        if key not in pieces:
            pieces[key] = make()
        return pieces[key]

    def of(row: int) -> Activations:
        return Activations(taps, lambda name, x: batch.cut(name, x, row, once))

    return [of(row) for row in range(batch.n)]


def metric_graph(
    metrics: Sequence[Metric],
    texts: Sequence[Activations],
    by: Mapping[str, Tensor],
    read: Mapping[str, Tensor],
) -> Graph:
    """The graph of a metric of each text and of their sum's gradients: "metric:0" and so on, "loss"
    for the sum, "grad:NAME" of what is wanted, and what is read, by name.

    No metric depends on another text, so that the sum's gradient by a text's activation is that of
    its own metric. Raises NoGradientError for what no metric depends on, and for ops without
    gradients.
    """
    pairs = zip(texts, metrics, strict=True)
    numbers = [scale(reshape(t.number(metric).node, ()), 1.0) for t, metric in pairs]
    y = scale(reduce(add, numbers), 1.0).named("metric")
    outputs: dict[str, Any] = {"loss": y, **read}
    outputs |= {f"metric:{i}": number for i, number in enumerate(numbers)}
    forward = Graph.of(**outputs)
    reaching = tensors_that_reach(y, [*forward.leaves, *forward.nodes])
    if strangers := [name for name, t in by.items() if t not in reaching]:
        raise NoGradientError(f"the metric does not depend on {first_names(strangers, 3)}")
    return build_backward(forward, by)


def metric_values(metrics: Sequence[Metric], texts: Sequence[Activations]) -> Graph:
    """The graph of a metric of each text, of any shape: "metric:0" and so on."""
    pairs = zip(texts, metrics, strict=True)
    numbers = (scale(t.numbers(metric).node, 1.0) for t, metric in pairs)
    outputs: dict[str, Any] = {f"metric:{i}": number for i, number in enumerate(numbers)}
    return Graph.of(**outputs)


def gradients_in(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Those among the outputs of `metric_graph`, by the names of what they are of."""
    prefix = "grad:"
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}


def gradients_by_text(arrays: Mapping[str, np.ndarray], batch: BatchRows) -> list[Gradients]:
    """What a run of `metric_graph` gave, by its names, text by text; all are of activations."""
    grads = {name: batch.arrays(name, g) for name, g in gradients_in(arrays).items()}
    at = {name: batch.arrays(name, a) for name, a in arrays.items() if name in grads}
    return [
        Gradients(
            float(arrays[f"metric:{i}"]),
            {name: rows[i] for name, rows in at.items()},
            {name: rows[i] for name, rows in grads.items()},
        )
        for i in range(batch.n)
    ]
