"""What expressions are in NumPy's float64: the reference of every device."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pyggml.formulas.expression import Expression
from pyggml.formulas.text import Language, define

_OWN = ("abs", "sqrt", "log", "exp", "expm1", "sin", "cos", "tanh", "floor", "ceil", "trunc")
NUMPY = Language(
    {
        **{name: f"np.{name}({{0}})" for name in _OWN},
        "where": "np.where({0}, {1}, {2})",
        "minimum": "np.minimum({0}, {1})",
        "maximum": "np.maximum({0}, {1})",
        "sgn": "np.sign({0})",
        "sigmoid": "(1 / (1 + np.exp(-np.maximum({0}, -709.0))))",
        "softplus": "np.logaddexp(0, {0})",
        "erfc": "erfc({0})",
    },
    number=repr,
    let="{0} = {1}",
)
_NAMES = {"np": np, "erfc": np.vectorize(math.erfc, otypes=[float])}


def numpy_function(roots: Sequence[Expression], symbols: Sequence[str]) -> Callable[..., Any]:
    """A function of arrays or numbers, in the order of these symbols: a tuple of the values."""
    statements, values = NUMPY.lines(roots)
    body = "".join(f"    {line}\n" for line in (*statements, f"return {', '.join(values)},"))
    return define(f"def values({', '.join(symbols)}):\n{body}", "values", _NAMES)
