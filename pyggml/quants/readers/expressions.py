"""Decoders of weight types (pyggml.quants.layout) as source code, for devices that compile it.

`ExpressionBlock` runs a decoder and writes down, for each group of 32 weights, the expression of
one of them. A subclass knows a language: how it reads bytes, and what it writes in its own way.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from pyggml.quants.layout import GROUP, SUBGROUP, Block


class Lanes(NamedTuple):
    """n numbers: `text(lane)` is the expression of one, for a lane named by a variable or a number.

    kind is "bytes" (0 to 255, held in 32 bits), "ints" or "floats".
    """

    kind: str
    n: int
    text: Callable[[str], str]


class ExpressionBlock(Block):
    """Collects `groups`: the index of its first weight -> the expression of one, by its lane.

    The expressions may also name the variable `lane`.
    """

    size = 1  # of plain types

    def __init__(self) -> None:
        self.groups: dict[int, Callable[[str], str]] = {}
        self._minima: Lanes | None = None

    @abstractmethod
    def chosen(self, lane: str, n: int, below: str, other: str) -> str:
        """`below` for a lane below n, else `other`."""

    @abstractmethod
    def lane_before(self, lane: str, n: int) -> str:
        """A lane minus n, a variable's."""

    def within(
        self, lane: str, n: int, below: Callable[[str], str], other: Callable[[str], str]
    ) -> str:
        """`below(lane)` below n, else `other(lane - n)`."""
        if lane.isdigit():
            number = int(lane)
            return below(lane) if number < n else other(str(number - n))
        return self.chosen(lane, n, below(lane), other(self.lane_before(lane, n)))

    def either(self, a: Lanes, b: Lanes) -> Lanes:
        each = b if b.n > 1 else self.lane(b, 0)
        return a._replace(text=lambda lane: f"({a.text(lane)} | {each.text(lane)})")

    def join(self, a: Lanes, b: Lanes) -> Lanes:
        return Lanes(a.kind, a.n + b.n, lambda lane: self.within(lane, a.n, a.text, b.text))

    def minus(self, whole: Lanes, n: int) -> Lanes:
        mask = " & 255" if whole.kind == "bytes" else ""
        return whole._replace(text=lambda lane: f"(({whole.text(lane)} - {n}){mask})")

    def times(self, floats: Lanes, factor: Lanes) -> Lanes:
        return floats._replace(text=lambda lane: f"({floats.text(lane)} * {factor.text('0')})")

    def negative(self, floats: Lanes) -> Lanes:
        return floats._replace(text=lambda lane: f"(-{floats.text(lane)})")

    def lane(self, numbers: Lanes, i: int) -> Lanes:
        return Lanes(numbers.kind, 1, lambda _: numbers.text(str(i)))

    def add_minimum(self, minimum: Lanes) -> None:
        self._minima = minimum

    def add_minima(self, minima: Lanes) -> None:
        self._minima = minima

    def add(self, scale: Lanes, q: Lanes, i: int = 0) -> None:
        self._put(scale.text("0"), q, i)

    def add_two(self, scales: tuple[Lanes, Lanes], q: Lanes, i: int, most: int) -> None:
        self._put(self._of_halves(scales), q, i)

    def _of_halves(self, two: tuple[Lanes, Lanes]) -> str:
        """The first of two floats for the first SUBGROUP, the second for the second."""
        first, second = (one.text("0") for one in two)
        return self.chosen("lane", SUBGROUP, first, second)

    def _minimum(self, i: int) -> str:
        minima = self._minima
        if minima is None:
            return ""
        if minima.n <= GROUP // 4:
            return self.lane(minima, i // GROUP).text("0")
        first = i // SUBGROUP
        return self._of_halves((self.lane(minima, first), self.lane(minima, first + 1)))

    def _put(self, scale: str, q: Lanes, i: int) -> None:
        minimum, numbers = self._minimum(i), self.floats(q)
        added = f" + {minimum}" if minimum else ""
        self.groups[i] = lambda lane: f"{scale} * {numbers.text(lane)}{added}"

    def add_floats(self, floats: Lanes, i: int) -> None:
        self.groups[i] = floats.text
