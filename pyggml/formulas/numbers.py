"""What expressions are in NumPy's float64: the reference of every device."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pyggml.formulas.expression import Expression, parts_of

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "+": np.add,
    "*": np.multiply,
    "/": np.divide,
    "<": np.less,
    "<=": np.less_equal,
    "where": np.where,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "abs": np.abs,
    "sgn": np.sign,
    "sqrt": np.sqrt,
    "log": np.log,
    "exp": np.exp,
    "expm1": np.expm1,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softplus": lambda x: np.logaddexp(0, x),
    "erfc": np.vectorize(math.erfc, otypes=[float]),
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
}


def evaluate(
    roots: Sequence[Expression], symbols: Mapping[str, np.ndarray | float]
) -> list[np.ndarray]:
    """Expressions of these values of their symbols, float64, without warnings."""
    values: dict[Expression, Any] = {}
    with np.errstate(all="ignore"):  # infinity and NaN are results, as in kernels
        for e in parts_of(*roots):
            if e.operation == "symbol":
                values[e] = np.asarray(symbols[str(e.value)], np.float64)
            elif e.operation == "number":
                values[e] = np.float64(e.value)
            else:
                values[e] = _FUNCTIONS[e.operation](*(values[o] for o in e.operands))
    return [np.asarray(values[root]) for root in roots]
