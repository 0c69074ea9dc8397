"""Activations: values of a graph that has not run yet, such as a model's.

What is written with a value's operators, or with `pyggml.functions`, becomes further nodes of the
graph. Whatever asks for a number is refused: the numbers are there when the graph has run.
"""

from typing import Any, ClassVar, NoReturn

import numpy as np

from pyggml import ops
from pyggml.backward import build_backward
from pyggml.eager.value import Value
from pyggml.errors import NoGradientError, ShapeError
from pyggml.graph import Graph
from pyggml.graph.tensor import Tensor


class Activation(Value):
    """A value whose numbers are not computed while the graph is built."""

    is_known: ClassVar[bool] = False
    __slots__ = ()

    def __init__(self, node: Tensor, requires_grad: bool = True) -> None:
        super().__init__(node, requires_grad)

    def numpy(self) -> np.ndarray:
        """Refused, as is whatever else asks for numbers: float(x), x < 1, x.argmax(), print(x)."""
        self._refuse()

    def item(self) -> float | int:
        self._refuse()

    def tolist(self) -> Any:
        self._refuse()

    def backward(self, gradient: np.ndarray | Value | None = None) -> None:
        raise NoGradientError(
            f"{self._label()} is part of a model's graph: model.grad differentiates by it"
        )

    def detach(self) -> Value:
        """The same numbers, which count as fixed."""
        return self._apply(ops.detach)

    def __repr__(self) -> str:
        return f"activation({self._description()})"

    def _refuse(self) -> NoReturn:
        raise ShapeError(
            f"{self._label()} has no numbers yet: they are there when the graph has run, so that "
            "what is made of it takes operators and functions of values, and no decisions"
        )


def gradient(y: Value, x: Value) -> Activation:
    """dy/dx as part of the graph, so that it can be differentiated again where its ops have rules.

    Raises NoGradientError if y does not depend on x, or if an op between them has no gradient.
    """
    back = build_backward(Graph.of(y.node), [x.node])
    return Activation(back.outputs[1])
