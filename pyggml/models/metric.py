"""Metrics: numbers made of a model's activations by a function, and their gradients.

    def metric(t):                                  # a logit difference
        return t["logits"][-1, 7] - t["logits"][-1, 5]

The function takes `Activations` and gives one number, by the operators of values and by
`pyggml.functions`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from pyggml.backward import build_backward
from pyggml.backward.walk import tensors_that_reach
from pyggml.eager.activation import Activation, gradient
from pyggml.eager.value import Value
from pyggml.errors import ConfigError, NoGradientError, ShapeError, first_names, suggestion
from pyggml.graph import Graph
from pyggml.graph.tensor import Tensor
from pyggml.models.taps import Taps
from pyggml.ops import reshape, scale

Metric = Callable[["Activations"], Value]


class NotMade(Exception):
    """An activation is made on demand, and was not asked for when the graph was built: its name."""


class Activations(Mapping[str, Activation]):
    """The activations of a graph by name, as what traces change leaves them."""

    def __init__(self, taps: Taps) -> None:
        self._tensors, self._names = taps.read, taps.names

    def __getitem__(self, name: str) -> Activation:
        """ConfigError for a name that no activation has; NotMade for one that is not made yet."""
        if name not in self._tensors:
            if name in self._names:
                raise NotMade(name)
            near = suggestion(str(name), self._names) or "; model.activations lists them"
            raise ConfigError(f"no activation is named {name}{near}")
        return Activation(self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def grad(self, metric: Metric, name: str) -> Activation:
        """d(metric)/d(activation), for a metric of gradients: a second derivative.

        Raises NoGradientError, naming the op, where its gradient has none itself.
        """
        return gradient(self.number(metric), self[name])

    def number(self, metric: Metric) -> Value:
        """The metric of these activations. Raises ShapeError if it is not one number."""
        y = metric(self)
        if not isinstance(y, Activation):
            raise ShapeError(
                f"the metric gave {y!r:.60}, wanted a number made of activations, such as "
                't["logits"][-1, 5]'
            )
        if y.size != 1:
            raise ShapeError(f"the metric has shape {y.shape}, wanted one number: index it, or sum")
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
        some = next(filter(None, fits), None)
        if some is None:
            near = suggestion(pattern, [name for kind in kinds for name in kind])
            raise ConfigError(f"no activation, adapter tensor or weight is named {pattern}{near}")
        chosen |= some
    return chosen


def metric_graph(
    metric: Metric,
    taps: Taps,
    wanted: Mapping[str, Tensor],
    read: Mapping[str, Tensor],
) -> Graph:
    """The graph of a metric: "loss", "grad:NAME" of what is wanted, and what is read, by name.

    Raises NoGradientError for what the metric does not depend on, and for ops without gradients.
    """
    y = scale(reshape(Activations(taps).number(metric).node, ()), 1.0).named("metric")
    outputs: dict[str, Any] = {"loss": y, **read}
    forward = Graph.of(**outputs)
    reaching = tensors_that_reach(y, [*forward.leaves, *forward.nodes])
    if strangers := [name for name, t in wanted.items() if t not in reaching]:
        raise NoGradientError(f"the metric does not depend on {first_names(strangers, 3)}")
    return build_backward(forward, wanted)
