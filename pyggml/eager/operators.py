"""The operators and methods of a Value. Each makes a node of the graph by a builder on Tensors."""

from abc import ABC, abstractmethod
from typing import Any, Self

import numpy as np

from pyggml import ops
from pyggml.eager import arithmetic
from pyggml.eager.arithmetic import Axes, Builder
from pyggml.eager.indexing import index
from pyggml.errors import ShapeError
from pyggml.graph.tensor import Shape

_NUMBER = (int, float, np.integer, np.floating)


class Operators(ABC):
    """What can be written with values: a + 2 * b, a @ b, a[1:], a.sum(axis=0), …"""

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """The size of each axis."""

    @abstractmethod
    def numpy(self) -> np.ndarray:
        """A copy of the numbers."""

    @abstractmethod
    def _apply(self, builder: Builder, *others: Any, **params: Any) -> Self:
        """The Value of builder(self, *others, **params)."""

    @abstractmethod
    def _compute(self, builder: Builder, *others: Any, **params: Any) -> Self:
        """The same with integers made floats first."""

    # -- arithmetic --------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Self:
        if isinstance(other, _NUMBER):
            return self._compute(ops.scale, s=1.0, b=float(other))
        return self._compute(arithmetic.add, other)

    def __sub__(self, other: Any) -> Self:
        if isinstance(other, _NUMBER):
            return self._compute(ops.scale, s=1.0, b=-float(other))
        return self._compute(arithmetic.sub, other)

    def __mul__(self, other: Any) -> Self:
        if isinstance(other, _NUMBER):
            return self._compute(ops.scale, s=float(other))
        return self._compute(arithmetic.mul, other)

    def __truediv__(self, other: Any) -> Self:
        if isinstance(other, _NUMBER):
            return self._compute(ops.scale, s=float(np.divide(1.0, other)))
        return self._compute(arithmetic.div, other)

    def __rsub__(self, other: Any) -> Self:
        return -self + other

    def __rtruediv__(self, other: Any) -> Self:
        return self._compute(arithmetic.reciprocal) * other

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Self:
        return self._compute(ops.neg)

    def __pow__(self, n: Any) -> Self:
        if not isinstance(n, _NUMBER):
            raise ShapeError("**: the exponent is no number; exp(n * log(x)) takes another value")
        return self._compute(arithmetic.power, n=float(n))

    def __matmul__(self, other: Any) -> Self:
        return self._compute(arithmetic.matmul, other)

    def __rmatmul__(self, other: Any) -> Self:
        return self._compute(lambda b, a: arithmetic.matmul(a, b), other)

    # -- comparisons: arrays of booleans, which no gradient passes ---------------------------------

    def __lt__(self, other: Any) -> np.ndarray:
        return np.asarray(_plain(self) < _plain(other))

    def __le__(self, other: Any) -> np.ndarray:
        return np.asarray(_plain(self) <= _plain(other))

    def __gt__(self, other: Any) -> np.ndarray:
        return np.asarray(_plain(self) > _plain(other))

    def __ge__(self, other: Any) -> np.ndarray:
        return np.asarray(_plain(self) >= _plain(other))

    # -- shapes ------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Self:
        keys = key if isinstance(key, tuple) else (key,)
        plain = tuple(map(_plain, keys))
        return self._apply(index, key=plain if isinstance(key, tuple) else plain[0])

    def reshape(self, *shape: Any) -> Self:
        """The same elements with other axes, one of which may be -1."""
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        return self._apply(ops.reshape, shape=tuple(wanted))

    def transpose(self, *axes: int) -> Self:
        """Axis i is axes[i] of this value; the axes in reverse by default."""
        return self._apply(ops.permute, axes=axes or tuple(reversed(range(len(self.shape)))))

    @property
    def T(self) -> Self:
        return self.transpose()

    # -- sums --------------------------------------------------------------------------------------

    def sum(self, axis: Axes = None, keepdims: bool = False) -> Self:
        """The sum over axes; over all by default."""
        return self._compute(arithmetic.total, axis=axis, keepdims=keepdims)

    def mean(self, axis: Axes = None, keepdims: bool = False) -> Self:
        """The mean over axes; over all by default."""
        return self._compute(arithmetic.average, axis=axis, keepdims=keepdims)

    def max(self, axis: int | None = None, keepdims: bool = False) -> Self:
        """The maximum over an axis, or of all; its gradient goes to the first of equals."""
        return self._compute(arithmetic.highest, axis=axis, keepdims=keepdims)

    def argmax(self) -> np.ndarray:
        """Positions of the largest along the last axis, int32."""
        return np.asarray(_plain(self).argmax(axis=-1), np.int32)

    # -- functions of each element -----------------------------------------------------------------

    def exp(self) -> Self:
        return self._compute(ops.exp)

    def log(self) -> Self:
        return self._compute(ops.log)

    def sqrt(self) -> Self:
        return self._compute(ops.sqrt)

    def abs(self) -> Self:
        return self._compute(ops.abs_)

    def tanh(self) -> Self:
        return self._compute(ops.tanh)

    def sigmoid(self) -> Self:
        return self._compute(ops.sigmoid)

    def relu(self) -> Self:
        return self._compute(ops.relu)


def _plain(x: Any) -> Any:
    return x.numpy() if isinstance(x, Operators) else x
