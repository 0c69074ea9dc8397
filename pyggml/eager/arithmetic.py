"""NumPy's meaning of arithmetic, made of the engine's ops: builders from Tensors to a Tensor.

ggml repeats an op's second source only; NumPy stretches axes of length 1 of both.
"""

from collections.abc import Callable
from math import inf, prod

import numpy as np

from pyggml import ops
from pyggml.errors import ShapeError
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import Shape, Tensor, leaf

Builder = Callable[..., Tensor]
Axes = int | tuple[int, ...] | None
_NUMBER = int | float | np.integer | np.floating


def broadcasting(build: Builder) -> Builder:
    """build(a, b) of one shape → a builder for two shapes that broadcast as NumPy's do."""

    def broadcast(a: Tensor, b: Tensor) -> Tensor:
        try:
            shape = np.broadcast_shapes(a.shape, b.shape)
        except ValueError:
            raise ShapeError(
                f"{build.__name__}: shapes {a.shape} and {b.shape} do not broadcast: axes, counted "
                "from the last, must be equal or 1"
            ) from None
        return build(a if a.shape == shape else ops.repeat(a, shape), b)

    return broadcast


add, sub, mul, div = map(broadcasting, (ops.add, ops.sub, ops.mul, ops.div))


def reciprocal(x: Tensor) -> Tensor:
    """1 / x."""
    return ops.div(_full(x.shape, 1.0), x)


def power(x: Tensor, n: float) -> Tensor:
    """xⁿ: by multiplication for whole n up to 16, by square root for ½, else e^(n·log x)."""
    if n < 0:
        return reciprocal(power(x, -n))
    if n == 0.5:
        return ops.sqrt(x)
    if n != int(n) or n > 16:
        return ops.exp(ops.scale(ops.log(x), n))
    if n == 0:
        return ops.scale(x, 0.0, 1.0)
    half = x if n < 4 else power(x, n // 2)
    square = x if n == 1 else ops.sqr(half)
    return square if n in (1, 2) or n % 2 == 0 else ops.mul(square, x)


def total(x: Tensor, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """The sum over axes; over all by default."""
    axes = _axes("sum", x, axis)
    if len(axes) == len(x.shape) and not keepdims:
        return ops.sum_(x)
    y = x
    for i in axes:
        y = _sum_along(y, i)
    kept = tuple(n for i, n in enumerate(y.shape) if keepdims or i not in axes)
    return ops.reshape(y, kept)


def average(x: Tensor, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """The mean over axes; over all by default."""
    n = prod(x.shape[i] for i in _axes("mean", x, axis))
    return ops.scale(total(x, axis, keepdims), 1 / n if n else float("nan"))


def _sum_along(x: Tensor, i: int) -> Tensor:
    """The sum over axis i, which stays with length 1."""
    return _along("sum", ops.sum_rows, x, i)


def highest(x: Tensor, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """The maximum over axes, or of all elements; its gradient goes to the first of equals."""
    axes = _axes("max or min", x, axis)
    if not axes:
        return x
    kept = [k for k in range(len(x.shape)) if k not in axes]
    rows = ops.cont(ops.permute(x, (*kept, *axes)))
    n = prod(x.shape[k] for k in axes)
    if not n:
        raise ShapeError(
            f"max or min: shape {x.shape} has nothing along {axes}, wanted one at least"
        )
    ids = ops.argmax(ops.reshape(rows, (-1, n)))
    table = ops.reshape(rows, (-1, n, 1))
    shape = tuple(1 if k in axes else m for k, m in enumerate(x.shape) if keepdims or k in kept)
    return ops.reshape(ops.get_rows(table, ops.reshape(ids, (-1, 1))), shape)


def lowest(x: Tensor, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """The minimum over axes, or of all elements; its gradient goes to the first of equals."""
    return ops.neg(highest(ops.neg(x), axis, keepdims))


def variance(x: Tensor, axis: Axes = None, keepdims: bool = False, ddof: int = 0) -> Tensor:
    """Σ (x - mean)² / (n - ddof) over the n elements along axes; of all by default."""
    n = prod(x.shape[i] for i in _axes("var", x, axis)) - ddof
    if n < 1:
        raise ShapeError(f"var: {n + ddof} elements and a ddof of {ddof}, wanted more elements")
    apart = sub(x, average(x, axis, keepdims=True))
    return ops.scale(total(ops.sqr(apart), axis, keepdims), 1 / n)


def deviation(x: Tensor, axis: Axes = None, keepdims: bool = False, ddof: int = 0) -> Tensor:
    """The square root of the variance; its slope is infinite where that is 0."""
    return ops.sqrt(variance(x, axis, keepdims, ddof))


def clip(x: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """x limited to [low, high]; a bound that is None does not limit."""
    if wrong := [b for b in (low, high) if not isinstance(b, _NUMBER | None)]:
        raise ShapeError(f"clip: a bound of {wrong[0]!r}, wanted a number or None")
    return ops.clamp(x, -inf if low is None else low, inf if high is None else high)


def cumsum(x: Tensor, axis: int | None = None) -> Tensor:
    """Running sums along an axis; of all elements in their order by default."""
    if axis is None:
        return ops.cumsum(ops.reshape(x, (-1,)))
    return _along("cumsum", ops.cumsum, x, axis)


def squeeze(x: Tensor, axis: Axes = None) -> Tensor:
    """x without the axes named, each of length 1; without all such axes by default."""
    ones = tuple(i for i, n in enumerate(x.shape) if n == 1)
    axes = ones if axis is None else _axes("squeeze", x, axis)
    if long := [i for i in axes if i not in ones]:
        raise ShapeError(f"squeeze: axis {long[0]} of shape {x.shape} is not of length 1")
    return ops.reshape(x, tuple(n for i, n in enumerate(x.shape) if i not in axes))


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """e^x / Σ e^x over an axis."""
    return _along("softmax", ops.soft_max, x, axis)


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """x - log Σ e^x over an axis; the maximum is subtracted first, so that no e^x is ∞."""
    return _along("log_softmax", _log_softmax_rows, x, axis)


def _log_softmax_rows(x: Tensor) -> Tensor:
    shifted = sub(x, ops.detach(highest(x, -1, keepdims=True)))
    return sub(shifted, ops.log(ops.sum_rows(ops.exp(shifted))))


def _along(name: str, build: Builder, x: Tensor, axis: int) -> Tensor:
    """What build makes of rows, along an axis: that changes places with the last one."""
    axes, last = _axes(name, x, axis), len(x.shape) - 1
    if len(axes) != 1:
        raise ShapeError(f"{name}: {len(axes)} axes, wanted one")
    i = axes[0]
    if i == last:
        return build(x)
    order = [*range(last + 1)]
    order[i], order[last] = last, i
    return ops.permute(build(ops.cont(ops.permute(x, tuple(order)))), tuple(order))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean of -log softmax(logits)[target], logits (..., n_classes), targets (...) integers."""
    if logits.shape[:-1] != targets.shape:
        raise ShapeError(
            f"cross_entropy: targets of shape {targets.shape} for logits of shape {logits.shape}, "
            f"wanted {logits.shape[:-1]}"
        )
    n = targets.n_elements
    rows = ops.reshape(logits, (n, logits.shape[-1]))
    return ops.cross_entropy_rows(rows, ops.reshape(targets, (n,)), _full((n,), 1 / max(n, 1)))


def _axes(name: str, x: Tensor, axis: Axes) -> tuple[int, ...]:
    """Axes counted from the first, each once."""
    n = len(x.shape)
    axes = range(n) if axis is None else axis if isinstance(axis, tuple | list) else (axis,)
    if wrong := [i for i in axes if not isinstance(i, int | np.integer)]:
        raise ShapeError(f"{name}: axis {wrong[0]!r}, wanted an integer")
    if wrong := [i for i in axes if not -n <= i < n]:
        raise ShapeError(f"{name}: there is no axis {wrong[0]} in shape {x.shape}")
    return tuple(sorted({i % n for i in axes}))


def _full(shape: Shape, value: float) -> Tensor:
    return leaf(np.full(shape, value, F32.numpy))
