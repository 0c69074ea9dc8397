"""Slopes: the derivative of an expression by a symbol.

At a bend, as of the larger of two numbers, it is the slope on one side: minimum(a, b) and
maximum(a, b) are b where the two are equal. What `where` does not take has no part in it, so that
infinity there does not become NaN.
"""

import math
from collections.abc import Callable

from pyggml.formulas.expression import (
    Expression,
    abs_,
    cos,
    exp,
    number,
    parts_of,
    sgn,
    sigmoid,
    sin,
    symbol,
    where,
)

# Of functions of one number x with the value y: dy/dx.
_OF_ONE: dict[str, Callable[[Expression, Expression], Expression]] = {
    "abs": lambda y, x: sgn(x),
    "exp": lambda y, x: y,
    "expm1": lambda y, x: y + 1,
    "log": lambda y, x: 1 / x,
    "sqrt": lambda y, x: 0.5 / y,
    "sin": lambda y, x: cos(x),
    "cos": lambda y, x: -sin(x),
    "tanh": lambda y, x: 1 - y * y,
    "sigmoid": lambda y, x: y * (1 - y),
    "softplus": lambda y, x: sigmoid(x),
    "erfc": lambda y, x: -2 / math.sqrt(math.pi) * exp(-x * x),
    **dict.fromkeys(("sgn", "floor", "ceil", "trunc"), lambda y, x: number(0)),
}


def slope_of(y: Expression, x: Expression) -> Expression:
    """dy/dx, where x is a symbol."""
    slopes: dict[Expression, Expression] = {}
    for e in parts_of(y):
        slopes[e] = number(1) if e is x else _slope(e, *(slopes[o] for o in e.operands))
    return slopes[y]


def _slope(e: Expression, *slopes: Expression) -> Expression:
    """The slope of an expression whose operands have these."""
    match e.operation, e.operands, slopes:
        case ("number" | "symbol" | "<" | "<=" | "sum" | "wide_sum" | "largest", _, _):
            return number(0)  # of reductions, see rows.py
        case "pick", (_, place), (dx, _):
            return where(abs_(symbol("place") - place) < 0.5, dx, 0)
        case "+", _, (da, db):
            return da + db
        case "*", (a, b), (da, db):
            return da * b + a * db
        case "/", (_, b), (da, db):
            return (da - e * db) / b
        case "where", (condition, _, _), (_, da, db):
            return where(condition, da, db)
        case "minimum", (a, b), (da, db):
            return where(a < b, da, db)
        case "maximum", (a, b), (da, db):
            return where(b < a, da, db)
    (x,), (dx,) = e.operands, slopes
    return _OF_ONE[e.operation](e, x) * dx
