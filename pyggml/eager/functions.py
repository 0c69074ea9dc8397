"""Functions of values, named as NumPy or PyTorch name them.

Each takes Values, arrays, lists or numbers, and gives a Value. Any other op is called by
`apply(ops.rms_norm, x)`.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from pyggml import ops
from pyggml.eager import arithmetic
from pyggml.eager.value import Value, apply, as_float, as_value, tensor
from pyggml.errors import ShapeError
from pyggml.graph.tensor import Shape, Tensor

_rng = np.random.default_rng(0)


# -- making values ---------------------------------------------------------------------------------


def zeros(*shape: int, requires_grad: bool = False, name: str = "") -> Value:
    return tensor(np.zeros(shape, np.float32), requires_grad, name)


def ones(*shape: int, requires_grad: bool = False, name: str = "") -> Value:
    return tensor(np.ones(shape, np.float32), requires_grad, name)


def randn(*shape: int, requires_grad: bool = False, name: str = "") -> Value:
    """Normally distributed numbers; see `seed`."""
    return tensor(_rng.standard_normal(shape, np.float32), requires_grad, name)


def arange(*bounds: int) -> Value:
    """Integers, as Python's range: (stop), (start, stop) or (start, stop, step)."""
    return tensor(np.arange(*bounds, dtype=np.int32))


def seed(n: int) -> None:
    """Start the random numbers of `randn` and `dropout` anew; without a call, from seed 0."""
    global _rng
    _rng = np.random.default_rng(n)


# -- functions of each element ---------------------------------------------------------------------


def _each(builder: Callable[[Tensor], Tensor], about: str) -> Callable[[Any], Value]:
    def function(x: Any) -> Value:
        return apply(builder, as_float(x))

    function.__name__ = function.__qualname__ = builder.__name__.rstrip("_")
    function.__doc__ = about
    return function


exp = _each(ops.exp, "e^x")
log = _each(ops.log, "The natural logarithm.")
sqrt = _each(ops.sqrt, "√x")
sin = _each(ops.sin, "sin x, x in radians.")
cos = _each(ops.cos, "cos x, x in radians.")
tanh = _each(ops.tanh, "tanh x")
sigmoid = _each(ops.sigmoid, "1 / (1 + e^-x)")
relu = _each(ops.relu, "max(x, 0)")
gelu = _each(ops.gelu_erf, "x · Φ(x), Φ the normal distribution's function.")
silu = _each(ops.silu, "x · sigmoid(x)")
softplus = _each(ops.softplus, "log(1 + e^x)")
abs = _each(ops.abs_, "|x|")


def where(condition: Any, a: Any, b: Any) -> Value:
    """a where the condition holds, else b; the three broadcast."""
    mask = np.asarray(condition.numpy() if isinstance(condition, Value) else condition, bool)
    chosen = mask.astype(np.float32)
    return as_float(a) * chosen + as_float(b) * (1 - chosen)


def maximum(a: Any, b: Any) -> Value:
    """The larger of the two; where they are equal, the gradient goes to the first."""
    a, b = as_float(a), as_float(b)
    return where(a >= b, a, b)


def minimum(a: Any, b: Any) -> Value:
    """The smaller of the two; where they are equal, the gradient goes to the first."""
    a, b = as_float(a), as_float(b)
    return where(a <= b, a, b)


# -- rows ------------------------------------------------------------------------------------------


def softmax(x: Any, axis: int = -1) -> Value:
    """e^x / Σ e^x over an axis."""
    return as_float(x).softmax(axis)


def log_softmax(x: Any, axis: int = -1) -> Value:
    """log softmax(x) over an axis."""
    return apply(arithmetic.log_softmax, as_float(x), axis=axis)


def dropout(x: Any, p: float = 0.5, training: bool = True) -> Value:
    """x with each element 0 with probability p, and 1 / (1 - p) times as large otherwise.

    What falls out is drawn anew in each call; see `seed`. Without training x stays as it is.
    """
    if not isinstance(p, int | float | np.floating):
        raise ShapeError(f"dropout: p is {p!r}, wanted 0 to below 1")
    if not training:
        return as_float(x)
    draw = _rng.integers(-(1 << 31), 1 << 31, 3, np.int32)
    return apply(ops.dropout, as_float(x), draw, p=p, stream=0)


def cross_entropy(logits: Any, targets: Any) -> Value:
    """The mean of -log softmax(logits)[target]: logits (..., n_classes), targets (...) integers."""
    logits, targets = as_float(logits), _integers(targets)
    for n in logits.shape[-1:]:
        if wrong := [i for i in targets.numpy().flat if not 0 <= i < n]:
            raise ShapeError(f"cross_entropy: target {wrong[0]} is none of {n} classes")
    return apply(arithmetic.cross_entropy, logits, targets)


def rms_norm(x: Any, eps: float = 1e-6) -> Value:
    """x / √(mean x² + eps) over the last axis."""
    return apply(ops.rms_norm, as_float(x), eps=eps)


def layer_norm(x: Any, eps: float = 1e-5) -> Value:
    """(x - mean) / √(variance + eps) over the last axis."""
    return apply(ops.norm, as_float(x), eps=eps)


def embedding(table: Any, ids: Any) -> Value:
    """The rows of table (n_rows, n) that ids (...) name: (..., n)."""
    table, ids = as_float(table), _integers(ids)
    if table.ndim != 2:
        raise ShapeError(f"embedding: a table of shape {table.shape}, wanted a matrix")
    return table[ids.numpy()]


# -- shapes and joins ------------------------------------------------------------------------------


def concatenate(values: Sequence[Any], axis: int = 0) -> Value:
    """The values one after the other along an axis that exists."""
    if not values:
        raise ShapeError("concatenate: no values, wanted one at least")
    return reduce(lambda a, b: apply(ops.concat, a, b, axis=axis), map(as_value, values))


def stack(values: Sequence[Any], axis: int = 0) -> Value:
    """Values of one shape side by side along a new axis."""
    parts = [as_value(v) for v in values]
    return concatenate([v.reshape(_with_one(v.shape, axis)) for v in parts], axis)


def _with_one(shape: Shape, axis: int) -> Shape:
    at = axis % (len(shape) + 1)
    return (*shape[:at], 1, *shape[at:])


def _integers(x: Any) -> Value:
    """A Value of integers; ShapeError for others."""
    value = as_value(x)
    if value.dtype.kind != "i":
        raise ShapeError(f"{value!r}: wanted integers")
    return value
