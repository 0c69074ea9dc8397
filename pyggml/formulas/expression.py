"""Expressions: numbers, symbols, and operations on them; equal ones are one object.

They are simplified as they are made: what is made of numbers is a number, 0 and 1 vanish, a product
has at most one number, in front, and multiples of one expression are added up. A difference is a
sum with a multiple by -1, a quotient by a number a product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

Operand: TypeAlias = "Expression | float"


class Expression:
    """An operation and what it takes: expressions; the value of a number, the name of a symbol.

    order   a text by which the operands of sums and products are sorted, so that a + b is b + a
    """

    __slots__ = ("operands", "operation", "order", "value")
    _all: ClassVar[dict[tuple[Any, ...], Expression]] = {}

    operation: str
    operands: tuple[Expression, ...]
    value: float | str
    order: str

    def __new__(cls, operation: str, *operands: Expression, value: float | str = "") -> Expression:
        key = (operation, operands, value)
        if key not in cls._all:
            new = super().__new__(cls)
            new.operation, new.operands, new.value = key
            new.order = f"{operation}({value}{','.join(e.order for e in operands)})"
            cls._all[key] = new
        return cls._all[key]

    def __add__(self, other: Operand) -> Expression:
        return _sum(self, expression(other))

    def __sub__(self, other: Operand) -> Expression:
        return _sum(self, _product(number(-1), expression(other)))

    def __mul__(self, other: Operand) -> Expression:
        return _product(self, expression(other))

    def __truediv__(self, other: Operand) -> Expression:
        return _quotient(self, expression(other))

    def __radd__(self, other: float) -> Expression:
        return number(other) + self

    def __rsub__(self, other: float) -> Expression:
        return number(other) - self

    def __rmul__(self, other: float) -> Expression:
        return number(other) * self

    def __rtruediv__(self, other: float) -> Expression:
        return number(other) / self

    def __neg__(self) -> Expression:
        return number(-1) * self

    def __lt__(self, other: Operand) -> Expression:
        return Expression("<", self, expression(other))

    def __le__(self, other: Operand) -> Expression:
        return Expression("<=", self, expression(other))

    def __gt__(self, other: Operand) -> Expression:
        return expression(other) < self

    def __ge__(self, other: Operand) -> Expression:
        return expression(other) <= self

    def __bool__(self) -> bool:
        raise TypeError("an expression is neither true nor false: wanted where(condition, a, b)")

    def __repr__(self) -> str:
        return f"Expression {self.order}"


def number(value: float) -> Expression:
    return Expression("number", value=float(value))


def symbol(name: str) -> Expression:
    return Expression("symbol", value=name)


def expression(x: Operand) -> Expression:
    """A number as an expression; an expression stays what it is."""
    return x if isinstance(x, Expression) else number(x)


def parts_of(*roots: Expression) -> Iterator[Expression]:
    """The expressions and all that they are made of, operands first, each once."""
    seen: set[Expression] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        e, is_ready = stack.pop()
        if is_ready:
            yield e
        elif e not in seen:
            seen.add(e)
            stack.append((e, True))
            stack += [(operand, False) for operand in reversed(e.operands)]


def rebuild(roots: Sequence[Expression], new: Mapping[Expression, Expression]) -> list[Expression]:
    """The expressions with some parts replaced, simplified anew."""
    rebuilt: dict[Expression, Expression] = {}
    for e in parts_of(*roots):
        rebuilt[e] = new[e] if e in new else _with_operands(e, *(rebuilt[o] for o in e.operands))
    return [rebuilt[root] for root in roots]


def _with_operands(e: Expression, *operands: Expression) -> Expression:
    """The operation of an expression on other operands."""
    if e.operation in _SIMPLIFIED:
        return _SIMPLIFIED[e.operation](*operands)
    return Expression(e.operation, *operands, value=e.value)


# -- how they are simplified ----------------------------------------------------------------------


def multiple(e: Expression) -> tuple[float, Expression]:
    """(c, rest) with e = c · rest; the rest of a number is 1."""
    if e.operation == "number":
        return float(e.value), number(1)
    if e.operation == "*" and e.operands[0].operation == "number":
        return float(e.operands[0].value), e.operands[1]
    return 1.0, e


def _times(c: float, rest: Expression) -> Expression:
    if c == 0 or rest is number(1):
        return number(c)
    return rest if c == 1 else Expression("*", number(c), rest)


def _product(a: Expression, b: Expression) -> Expression:
    (c, x), (d, y) = multiple(a), multiple(b)
    one = number(1)
    for p, q in ((x, y), (y, x)):  # p / q · q is p, 1 / p · q is q / p
        if p.operation == "/" and p.operands[1] is q:
            return number(c * d) * p.operands[0]
        if p.operation == "/" and p.operands[0].operation == "number":
            return _quotient(number(c * d) * p.operands[0] * q, p.operands[1])
    rest = y if x is one else x if y is one else Expression("*", *sorted((x, y), key=_order))
    return _times(c * d, rest)


def _sum(a: Expression, b: Expression) -> Expression:
    (c, x), (d, y) = multiple(a), multiple(b)
    if x is y:
        return _times(c + d, x)
    zero = number(0)
    return b if a is zero else a if b is zero else Expression("+", *sorted((a, b), key=_order))


def _quotient(a: Expression, b: Expression) -> Expression:
    if b.operation == "number":
        return a * (1 / float(b.value))
    return a if a is number(0) else Expression("/", a, b)


def _order(e: Expression) -> str:
    return e.order


# -- functions ------------------------------------------------------------------------------------


def function(name: str, *operands: Operand) -> Expression:
    """A function that each device has in its table, by its name there."""
    return Expression(name, *map(expression, operands))


def where(condition: Expression, a: Operand, b: Operand) -> Expression:
    """a where the condition holds, else b; what is not taken may be anything."""
    first, second = expression(a), expression(b)
    return first if first is second else Expression("where", condition, first, second)


_SIMPLIFIED: dict[str, Callable[..., Expression]] = {
    "+": _sum,
    "*": _product,
    "/": _quotient,
    "where": where,
}


def minimum(a: Operand, b: Operand) -> Expression:
    return function("minimum", a, b)


def maximum(a: Operand, b: Operand) -> Expression:
    return function("maximum", a, b)


def clip(x: Operand, low: Operand, high: Operand) -> Expression:
    """x limited to [low, high]."""
    return minimum(maximum(x, low), high)


def abs_(x: Operand) -> Expression:
    return function("abs", x)


def sgn(x: Operand) -> Expression:
    """-1, 0 or 1."""
    return function("sgn", x)


def sqrt(x: Operand) -> Expression:
    return function("sqrt", x)


def log(x: Operand) -> Expression:
    """The natural logarithm."""
    return function("log", x)


def exp(x: Operand) -> Expression:
    return function("exp", x)


def expm1(x: Operand) -> Expression:
    """e^x - 1, exact near 0."""
    return function("expm1", x)


def sin(x: Operand) -> Expression:
    return function("sin", x)


def cos(x: Operand) -> Expression:
    return function("cos", x)


def tanh(x: Operand) -> Expression:
    return function("tanh", x)


def sigmoid(x: Operand) -> Expression:
    """1 / (1 + e^-x)."""
    return function("sigmoid", x)


def softplus(x: Operand) -> Expression:
    """log(1 + e^x), without overflow."""
    return function("softplus", x)


def erfc(x: Operand) -> Expression:
    """1 - erf x, of full precision far out."""
    return function("erfc", x)


def floor(x: Operand) -> Expression:
    """The whole number at or below x."""
    return function("floor", x)


def ceil(x: Operand) -> Expression:
    """The whole number at or above x."""
    return function("ceil", x)


def trunc(x: Operand) -> Expression:
    """x rounded towards 0."""
    return function("trunc", x)
