"""Reductions in formulas: numbers that all elements of a row have in common, and their slopes.

    def rms_norm(x, *, eps):
        return x / sqrt(mean(x * x) + eps)

A row program computes such a formula in passes over a row: sums of what each element gives, numbers
made of these sums, and so on; the last pass stores the results.
"""

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from pyggml.formulas.expression import Expression, Operand, expression, number, parts_of, symbol
from pyggml.formulas.slopes import slope_of

LENGTH = symbol("n")  # how many elements a row has
PLACE = symbol("place")  # of an element in its row, from 0
KEPT = symbol("kept")  # what a pass before has stored where the result will be
SUMS = "sum", "wide_sum"
REDUCTIONS = *SUMS, "largest"


def total(e: Operand) -> Expression:
    """The sum over a row."""
    return Expression("sum", expression(e))


def wide_total(e: Operand) -> Expression:
    """The sum over a row, in float64 where a device has it."""
    return Expression("wide_sum", expression(e))


def mean(e: Operand) -> Expression:
    """The mean of a row."""
    return total(e) / LENGTH


def largest(e: Operand) -> Expression:
    """The greatest of a row. It counts as a constant: what is made of it must not depend on it, as
    a softmax does not on what is taken off all of its scores."""
    return Expression("largest", expression(e))


def pick(x: Expression, at: Operand) -> Expression:
    """The element of a source that stands at a place, which kernels keep inside of the row."""
    return Expression("pick", x, expression(at))


def reductions_in(*roots: Expression) -> list[Expression]:
    """All reductions, those that others need before these."""
    return [e for e in parts_of(*roots) if e.operation in REDUCTIONS]


class Pass(NamedTuple):
    """A pass over a row.

    common    names and values of what its elements have in common, made of sums of passes before
    values    what each element gives
    sums      how each of these is reduced, and the sum's name; none in the pass that stores them
    kept      which of the values is stored where the result will be, if one is
    """

    common: list[tuple[str, Expression]]
    values: list[Expression]
    sums: list[tuple[str, str]]
    kept: int | None = None


def _made_of(e: Expression, operands: Iterable[Expression]) -> Expression:
    """The operation of an expression on other operands, as it stands."""
    return Expression(e.operation, *operands, value=e.value)


def _above_and_below(e: Expression) -> tuple[Expression, Expression]:
    """(a, b) with e = a / b, so that it takes one division."""
    if e.operation not in ("*", "/"):
        return e, number(1)
    (a, b), (c, d) = map(_above_and_below, e.operands)
    return (a * c, b * d) if e.operation == "*" else (a * d, b * c)


class Rows:
    """Which numbers differ along a row: those made of these sources, outside of reductions."""

    def __init__(self, along: Collection[str]) -> None:
        self._along = frozenset((*along, PLACE.value, KEPT.value))
        self.differs = cache(self._differs)

    def _differs(self, e: Expression) -> bool:
        if e.operation == "symbol":
            return e.value in self._along
        return e.operation not in (*REDUCTIONS, "pick") and any(map(self.differs, e.operands))

    def split(self, e: Expression) -> tuple[Expression, Expression]:
        """(c, rest) with e = c · rest, where c is all that a row has in common."""
        one = number(1)
        if not self.differs(e):
            return e, one
        if e.operation in ("*", "/"):
            (c, x), (d, y) = map(self.split, e.operands)
            return (c * d, x * y) if e.operation == "*" else (c / d, x / y)
        return one, e

    def total(self, e: Expression) -> Expression:
        """The sum over a row, with what it has in common in front; 0 where that can be seen, as of
        what is left after the mean."""
        common, rest = self.split(e)
        if common is number(0) or rest is number(1):
            return common * LENGTH
        if rest.operation == "+":
            a, b = rest.operands
            if self.total(a) + self.total(b) is number(0):
                return number(0)
        return common * total(rest)

    def gradient(self, y: Expression, x: Expression, dy: Expression) -> Expression:
        """dx, where every y of a row is made of every x by way of reductions; or the one y that a
        row has."""
        reductions = reductions_in(y)
        along = self.total if self.differs(y) else expression
        dx = dy * slope_of(y, x)
        shares: dict[Expression, Expression] = {}  # d(loss)/d(reduction)
        for one in reversed(reductions):
            share = along(dy * slope_of(y, one))
            for other, more in shares.items():
                share = share + more * self.total(slope_of(other.operands[0], one))
            shares[one] = share if one.operation in SUMS else number(0)
            dx = dx + shares[one] * slope_of(one.operands[0], x)
        return dx

    # -- passes -----------------------------------------------------------------------------------

    def _apart(self, a: Expression, b: Expression) -> bool:
        """Whether both differ, and not both have a factor in common along a row."""
        commons = [self.split(e)[0] for e in (a, b)]
        return self.differs(a) and self.differs(b) and number(1) in commons

    def _gather(self, e: Expression) -> Expression:
        """The same, where what a row has in common is computed apart: once, and multiplied by. What
        one factor has of it is multiplied by that factor first, as it is written."""
        if not self.differs(e) or not e.operands:
            return e
        if e.operation == "/" or (e.operation == "*" and not self._apart(*e.operands)):
            common, rest = self.split(e)
            inner = _made_of(rest, map(self._gather, rest.operands))
            return inner if common is number(1) else Expression("*", common, inner)
        return _made_of(e, map(self._gather, e.operands))

    def _keep(
        self, results: list[Expression], values: list[Expression]
    ) -> tuple[list[Expression], int | None]:
        """Results made of one of the values that are summed before, and of no source; and which
        value that is. The same results where there is none."""

        def read(e: Expression) -> bool:
            """Whether a source's number is needed."""
            inner = e.operands if self.differs(e) else ()
            is_source = e.operation == "symbol" and e not in (PLACE, KEPT) and self.differs(e)
            return is_source or any(map(read, inner))

        def put(value: Expression, e: Expression) -> Expression:
            if e is value or not self.differs(e):
                return KEPT if e is value else e
            return _made_of(e, (put(value, o) for o in e.operands))

        for i, value in enumerate(values):
            new = [put(value, e) for e in results]
            if value.operands and new != results and not any(map(read, new)):
                return new, i
        return results, None

    def passes(self, results: Sequence[Expression], keeps: bool = False) -> Iterator[Pass]:
        """What is computed of a row, one pass after the other; the results in the last one.

        keeps: whether what is summed may be stored in between, where the one result will be
        """
        names: dict[Expression, Expression] = {}
        last, kept = [self._gather(e) for e in results], None
        keeps = keeps and sum(map(self.differs, results)) == 1
        left = {e: self._gather(e.operands[0]) for e in reductions_in(*results)}
        while left:
            now = [e for e, of in left.items() if names.keys() >= {*reductions_in(of)}]
            new = {e: symbol(f"s{len(names) + i}") for i, e in enumerate(now)}
            sums = [(e.operation, str(name.value)) for e, name in new.items()]
            values = [left.pop(e) for e in now]
            if keeps and not left:
                last, kept = self._keep(last, values)
            yield self._pass(values, names, sums)._replace(kept=kept)
            names |= new
        yield self._pass(last, names, [])

    def _pass(
        self,
        roots: list[Expression],
        names: dict[Expression, Expression],
        sums: list[tuple[str, str]],
    ) -> Pass:
        """names: of reductions that passes before have computed"""
        common: dict[Expression, Expression] = {}

        def cut(e: Expression) -> Expression:
            """The same, made of names for all that a row has in common."""
            if self.differs(e):
                return _made_of(e, map(cut, e.operands))
            if e.operands:
                common.setdefault(e, symbol(f"c{len(names)}_{len(common)}"))
            return common.get(e, e)

        def of_names(e: Expression) -> Expression:
            return names[e] if e in names else _made_of(e, map(of_names, e.operands))

        values = [cut(e) for e in roots]
        quotients = ((c, operator.truediv(*_above_and_below(e))) for e, c in common.items())
        return Pass([(str(c.value), of_names(e)) for c, e in quotients], values, sums)
