"""What expressions are in NumPy's float64: the reference of every device."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pyggml.formulas.expression import Expression
from pyggml.formulas.rows import SUMS
from pyggml.formulas.text import Language, define_function

_OWN = ("abs", "sqrt", "log", "exp", "expm1", "sin", "cos", "tanh", "floor", "ceil", "trunc")
NUMPY = Language(
    {
        **{name: f"np.{name}({{0}})" for name in _OWN},
        "where": "np.where({0}, {1}, {2})",
        "minimum": "np.minimum({0}, {1})",
        "maximum": "np.maximum({0}, {1})",
        "sgn": "np.sign({0})",
        "sigmoid": "(np.exp(np.minimum({0}, 0)) / (1 + np.exp(-np.abs({0}))))",  # no overflow
        "softplus": "np.logaddexp(0, {0})",
        "erfc": "erfc({0})",
        "pick": "np.take_along_axis({0}, np.int64({1}), -1)",
        **dict.fromkeys(SUMS, "np.sum({0}, axis=-1, keepdims=True)"),
        "largest": "np.max({0}, axis=-1, keepdims=True)",
    },
    number=repr,
)
_NAMES = {"np": np, "erfc": np.vectorize(math.erfc, otypes=[float])}


def numpy_function(e: Expression, symbols: Sequence[str]) -> Callable[..., Any]:
    """An expression's value as a function of arrays or numbers, in the order of these symbols."""
    return define_function(NUMPY, "value", symbols, [e], _NAMES)
