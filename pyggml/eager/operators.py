"""The operators and methods of a Value. Each makes a node of the graph by a builder on Tensors."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from pyggml import ops
from pyggml.eager import arithmetic
from pyggml.eager.arithmetic import Axes, Builder
from pyggml.eager.indexing import index
from pyggml.eager.matmul import matmul
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
    def _apply(self, builder: Builder, *operands: Any, **params: Any) -> Self:
        """The Value of builder(self, *others, **params)."""

    @abstractmethod
    def _compute(self, builder: Builder, *operands: Any, **params: Any) -> Self:
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

    def __rpow__(self, base: Any) -> Self:
        if not isinstance(base, _NUMBER) or not base > 0:
            raise ShapeError(f"**: the base is {base!r}, wanted a number above 0")
        return self._compute(ops.scale, s=float(np.log(base))).exp()

    def __matmul__(self, other: Any) -> Self:
        return self._compute(matmul, other)

    def __rmatmul__(self, other: Any) -> Self:
        return self._compute(lambda b, a: matmul(a, b), other)

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
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        return self._apply(ops.reshape, shape=tuple(sizes))

    def transpose(self, *axes: int) -> Self:
        """Axis i is axes[i] of this value; the axes in reverse by default."""
        return self._apply(ops.permute, axes=axes or tuple(reversed(range(len(self.shape)))))

    @property
    def T(self) -> Self:
        return self.transpose()

    def flatten(self) -> Self:
        """All elements in their order, on one axis."""
        return self.reshape(-1)

    def squeeze(self, axis: Axes = None) -> Self:
        """Without these axes, each of length 1; without all axes of length 1 by default."""
        return self._apply(arithmetic.squeeze, axis=axis)

    # -- sums --------------------------------------------------------------------------------------

    def sum(self, axis: Axes = None, keepdims: bool = False) -> Self:
        """The sum over axes; over all by default."""
        return self._compute(arithmetic.total, axis=axis, keepdims=keepdims)

    def mean(self, axis: Axes = None, keepdims: bool = False) -> Self:
        """The mean over axes; over all by default."""
        return self._compute(arithmetic.average, axis=axis, keepdims=keepdims)

    def var(self, axis: Axes = None, keepdims: bool = False, ddof: int = 0) -> Self:
        """The variance over axes, of n elements each: a sum of squares divided by n - ddof."""
        return self._compute(arithmetic.variance, axis=axis, keepdims=keepdims, ddof=ddof)

    def std(self, axis: Axes = None, keepdims: bool = False, ddof: int = 0) -> Self:
        """The square root of the variance."""
        return self._compute(arithmetic.deviation, axis=axis, keepdims=keepdims, ddof=ddof)

    def max(self, axis: Axes = None, keepdims: bool = False) -> Self:
        """The maximum over axes, or of all; its gradient goes to the first of equals."""
        return self._compute(arithmetic.highest, axis=axis, keepdims=keepdims)

    def min(self, axis: Axes = None, keepdims: bool = False) -> Self:
        """The minimum over axes, or of all; its gradient goes to the first of equals."""
        return self._compute(arithmetic.lowest, axis=axis, keepdims=keepdims)

    def argmax(self, axis: int | None = None, keepdims: bool = False) -> np.ndarray:
        """Positions of the largest along an axis, or that of the largest of all elements, int32."""
        return _positions(np.argmax, self, axis, keepdims)

    def argmin(self, axis: int | None = None, keepdims: bool = False) -> np.ndarray:
        """Positions of the smallest along an axis, or that of the smallest of all, int32."""
        return _positions(np.argmin, self, axis, keepdims)

    # -- along an axis -----------------------------------------------------------------------------

    def cumsum(self, axis: int | None = None) -> Self:
        """Running sums along an axis; of all elements in their order by default."""
        return self._compute(arithmetic.cumsum, axis=axis)

    def softmax(self, axis: int = -1) -> Self:
        """e^x / Σ e^x over an axis."""
        return self._compute(arithmetic.softmax, axis=axis)

    # -- functions of each element -----------------------------------------------------------------

    def clip(self, low: float | None = None, high: float | None = None) -> Self:
        """Limited to [low, high]; a bound that is None does not limit."""
        return self._compute(arithmetic.clip, low=low, high=high)

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


def _positions(
    of: Callable[..., Any], x: Operators, axis: int | None, keepdims: bool
) -> np.ndarray:
    """np.argmax or np.argmin of the numbers; ShapeError for an axis that is not there."""
    try:
        return np.asarray(of(x.numpy(), axis=axis, keepdims=keepdims), np.int32)
    except (TypeError, ValueError) as error:
        raise ShapeError(f"{of.__name__}: axis {axis!r}: {error}") from None
