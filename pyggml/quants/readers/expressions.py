"""Decoders of weight types (pyggml.quants.layout) as source code, for devices that compile it.

`ExpressionBlock` runs a decoder and writes down, for each group of 32 weights, the expression of
one of them. A subclass knows a language: how it reads bytes, and what it writes in its own way.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pyggml.quants.layout import GROUP, SUBGROUP, Block


class Lanes(NamedTuple):
    """n numbers: `text(lane)` is the expression of one, for a lane named by a variable or a number.

    kind   "bytes" (0 to 255, held in 32 bits), "ints" or "floats"
    word   word(i) is the expression of the i-th four bytes, where a device takes these at once
    """

    kind: str
    n: int
    text: Callable[[str], str]
    word: Callable[[int], str] | None = None


class ExpressionBlock(Block):
    """Collects `groups`: the index of its first weight -> the expression of one, by its lane.

    The expressions may also name the variable `lane`.
    """

    size = 1  # of plain types

    def __init__(self) -> None:
        self.groups: dict[int, Callable[[str], str]] = {}
        self._minima: Lanes | None = None

    @abstractmethod
    def number(self, lane: str, value: int) -> str:
        """A whole number, as often as the lane stands for numbers."""

    def shift(self, lane: str, n: int) -> str:
        """The same without a sign, as shifts and bounds of lanes have it."""
        return self.number(lane, n)

    def of_all(self, lane: str, text: str) -> str:
        """One expression, as often as the lane stands for numbers."""
        return text

    @abstractmethod
    def where(self, condition: str, a: str, b: str) -> str:
        """a where the condition holds, else b."""

    @abstractmethod
    def as_float(self, lane: str, whole: str) -> str:
        """Ints as float32."""

    def chosen(self, lane: str, n: int, below: str, other: str) -> str:
        """`below` for a lane below n, else `other`."""
        return self.where(f"{lane} < {self.shift('0', n)}", below, other)

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

    def pairs(self, offset: int) -> Lanes:
        return self.fields(offset, 8, 2)._replace(kind="bytes")

    def bits(self, whole: Lanes, first: int, n: int, to: int = 0) -> Lanes:
        def text(lane: str) -> str:
            moved = whole.text(lane)
            moved = f"({moved} >> {self.shift(lane, first)})" if first else moved
            field = f"({moved} & {self.number(lane, (1 << n) - 1)})"
            return f"({field} << {self.shift(lane, to)})" if to else field

        kind = "ints" if to + n < 8 else whole.kind  # which has no sign
        return whole._replace(kind=kind, text=text)

    def either(self, a: Lanes, b: Lanes) -> Lanes:
        def text(lane: str) -> str:
            other = b.text(lane) if b.n > 1 else self.of_all(lane, b.text("0"))
            return f"({a.text(lane)} | {other})"

        return Lanes(_kind_of(a, b), a.n, text)

    def join(self, a: Lanes, b: Lanes) -> Lanes:
        return Lanes(_kind_of(a, b), a.n + b.n, lambda lane: self.within(lane, a.n, a.text, b.text))

    def _byte(self, lane: str, text: str) -> str:
        return f"({text} & {self.number(lane, 255)})"

    def minus(self, whole: Lanes, n: int) -> Lanes:
        def text(lane: str) -> str:
            less = f"({whole.text(lane)} - {self.number(lane, n)})"
            return self._byte(lane, less) if whole.kind == "bytes" else less

        return whole._replace(text=text)

    def except_for(self, ints: Lanes, n: int) -> Lanes:
        def text(lane: str) -> str:
            number = ints.text(lane)
            is_n = f"{number} == {self.number(lane, n)}"
            return self.where(is_n, self.number(lane, 0), number)

        return ints._replace(text=text)

    def digits(self, whole: Lanes, i: int) -> Lanes:
        def text(lane: str) -> str:
            fraction = self._byte(lane, f"({whole.text(lane)} * {self.number(lane, 3**i)})")
            return f"(({fraction} * {self.number(lane, 3)}) >> {self.shift(lane, 8)})"

        return whole._replace(text=text)

    def negate(self, whole: Lanes, where: Lanes) -> Lanes:
        def text(lane: str) -> str:
            mask = where.text(lane)
            return self._byte(lane, f"(({whole.text(lane)} ^ {mask}) - {mask})")

        return whole._replace(kind="bytes", text=text)

    def floats(self, whole: Lanes) -> Lanes:
        def text(lane: str) -> str:
            number = whole.text(lane)
            if whole.kind == "bytes":
                half = self.number(lane, 128)
                number = f"({number} ^ {half}) - {half}"
            return self.as_float(lane, number)

        return Lanes("floats", whole.n, text)

    def times(self, floats: Lanes, factor: Lanes) -> Lanes:
        return floats._replace(text=lambda lane: f"({floats.text(lane)} * {factor.text('0')})")

    def negative(self, floats: Lanes) -> Lanes:
        return floats._replace(text=lambda lane: f"(-{floats.text(lane)})")

    def lane(self, numbers: Lanes, i: int) -> Lanes:
        return Lanes(numbers.kind, 1, lambda _: numbers.text(str(i)))

    def add_minima(self, minima: Lanes) -> None:
        self._minima = minima

    def add_two(self, scales: tuple[Lanes, Lanes], q: Lanes, i: int, most: int) -> None:
        scale, numbers = self._of_halves([one.text("0") for one in scales]), self.floats(q)
        minima = self._minima_of(i)
        added = f" + {self._of_halves(minima)}" if minima else ""
        self.groups[i] = lambda lane: f"{scale} * {numbers.text(lane)}{added}"

    def _of_halves(self, texts: Sequence[str]) -> str:
        """The first of two floats for the first SUBGROUP, the last for the second."""
        first, last = texts[0], texts[-1]
        return first if first == last else self.chosen("lane", SUBGROUP, first, last)

    def _minima_of(self, i: int) -> list[str]:
        """The minima of the group with weight i: none, one, or one for each half."""
        minima = self._minima
        if minima is None:
            return []
        at = [i // GROUP] if minima.n <= GROUP // 4 else [i // SUBGROUP, i // SUBGROUP + 1]
        return [self.lane(minima, n).text("0") for n in at]

    def add_floats(self, floats: Lanes, i: int) -> None:
        self.groups[i] = floats.text


def _kind_of(a: Lanes, b: Lanes) -> str:
    """Of what is made of both: bytes, whose eighth bit is a sign, if one of them is."""
    return "bytes" if "bytes" in (a.kind, b.kind) else a.kind
