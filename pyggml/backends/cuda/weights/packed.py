"""Weights of a unit as whole numbers, four to a word: for the products of gemm/packed_dots.py.

A unit is what one thread multiplies: at most eight groups of 32 weights, in one block or several.
`PackedBlock` runs a decoder (pyggml.quants.layout) and writes down, for each group, the expressions
of its scales, its minimum and its eight words, of the unit's own words w0, w1, … The grids of its
type lie in shared memory too (`grid_words_of`): r0_0, r0_1, … are the words of rows that it reads.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import gcd
from textwrap import indent
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.code import byte_ptx, ptx
from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.weights.readers import PythonBlock, half_e8m0, with_named_numbers
from pyggml.quants import QUANTS
from pyggml.quants.layout import EVEN_SIGNS, GROUP, ByteTable
from pyggml.quants.readers.expressions import Lanes

MOST_GROUPS = 8  # of a unit
_ONES = 0x01010101


class PackedGroup(NamedTuple):
    """Expressions of 32 weights: a scale for each half, eight words, and minima: none, one, or one
    for each half."""

    scales: tuple[str, str]
    words: tuple[str, ...]
    minima: tuple[str, ...]


class GridRow(NamedTuple):
    """Row `at` of a grid, an expression."""

    table: ByteTable
    at: str


def _bits(n: int) -> str:
    return f"np.uint32({n:#x})"


def _shift_right(word: str, n: int) -> str:
    """A word without its first n bits."""
    return f"({word} >> {_bits(n)})" if n else word


class PackedBlock(PythonBlock):
    """Collects the groups of the block that begins at byte `start` of its unit, and in `rows` the
    unit's rows of grids. Lanes are numbers."""

    def __init__(self, start: int, rows: list[GridRow]) -> None:
        super().__init__()
        self._groups: dict[int, PackedGroup] = {}
        self._start, self._rows = start, rows
        self._no_zeros: list[Lanes] = []  # bytes of which none is 0

    def number(self, lane: str, value: int) -> str:
        return f"np.int32({value})"

    # -- reading -------------------------------------------------------------------------------

    def _load(self, offset: int) -> str:
        """Four bytes: a word, or what is in two."""
        i, first = divmod(self._start + offset, 4)
        if not first:
            return f"w{i}"
        return f"pick_bytes(w{i}, w{i + 1}, {_bits(0x3210 + 0x1111 * first)})"

    def _byte_at(self, offset: int) -> str:
        i, first = divmod(self._start + offset, 4)
        return f"({_shift_right(f'w{i}', 8 * first)} & {_bits(255)})"

    def _short(self, offset: int) -> str:
        i, first = divmod(self._start + offset, 4)
        if first == 3:
            return f"({self._load(offset)} & {_bits(0xFFFF)})"
        return f"({_shift_right(f'w{i}', 8 * first)} & {_bits(0xFFFF)})"

    def bytes(self, offset: int, n: int = GROUP) -> Lanes:
        def text(lane: str) -> str:
            return f"np.int32({self._byte_at(offset + int(lane))})"

        return Lanes("bytes", n, text, lambda i: self._load(offset + 4 * i))

    def flags(self, offset: int, value: int) -> Lanes:
        def word(i: int) -> str:
            four = f"(({self._load(offset)} >> {_bits(4 * i)}) & {_bits(15)})"
            if value == 255:
                return f"mask_of({four})"
            return f"((({four} * {_bits(0x00204081)}) & {_bits(_ONES)}) * {_bits(value)})"

        return Lanes("bytes", GROUP, _no_single, word)

    def pairs(self, offset: int) -> Lanes:
        def word(i: int) -> str:
            return f"spread_pairs({self._byte_at(offset + i)})"

        return super().pairs(offset)._replace(word=word)

    def fields(self, offset: int, n_bytes: int, n_bits: int, n: int | None = None) -> Lanes:
        def text(lane: str) -> str:
            first = int(lane) * n_bits
            at, first = offset + first // 8, first % 8
            number = self._short(at) if n_bits == 16 else self._byte_at(at)
            if 8 % n_bits and n_bits < 8:  # some lie in two bytes
                at, first = offset, int(lane) * n_bits
                number = self._load(at) if n_bytes == 4 else self._short(at)
            shift, mask = self.number(lane, first), self.number(lane, (1 << n_bits) - 1)
            return f"((np.int32({number}) >> {shift}) & {mask})"

        return Lanes("ints", n or -(-8 * n_bytes // n_bits), text)

    def f16(self, offset: int, n: int = 1) -> Lanes:
        return Lanes("floats", n, lambda i: f"half_of({self._short(offset + 2 * int(i))})")

    def half_e8m0(self, offset: int) -> Lanes:
        return Lanes("floats", 1, lambda _: f"half_e8m0(np.uint32({self._byte_at(offset)}))")

    # -- arithmetic ----------------------------------------------------------------------------

    def bits(self, whole: Lanes, first: int, n: int, to: int = 0) -> Lanes:
        def word(of: str) -> str:
            moved = f"({_shift_right(of, first)} & {_bits(((1 << n) - 1) * _ONES)})"
            return f"({moved} << {_bits(to)})" if to else moved

        return super().bits(whole, first, n, to)._replace(word=_word_of(word, whole))

    def either(self, a: Lanes, b: Lanes) -> Lanes:
        word = _word_of(lambda one, other: f"({one} | {other})", a, b)
        return super().either(a, b)._replace(word=word)

    def join(self, a: Lanes, b: Lanes) -> Lanes:
        def word(i: int) -> str:
            assert a.word is not None and b.word is not None
            return a.word(i) if i < a.n // 4 else b.word(i - a.n // 4)

        return super().join(a, b)._replace(word=a.word and b.word and word)

    def minus(self, whole: Lanes, n: int) -> Lanes:
        def word(of: str) -> str:  # of bytes below 128: their top bits keep what is borrowed
            top = _bits(0x80 * _ONES)
            return f"((({of} | {top}) - {_bits(n * _ONES)}) ^ {top})"

        return super().minus(whole, n)._replace(word=_word_of(word, whole))

    def digits(self, whole: Lanes, i: int) -> Lanes:
        word = _word_of(lambda of: f"digits_of({of}, {_bits(3**i)})", whole)
        return whole._replace(text=_no_single, word=word)

    def negate(self, whole: Lanes, where: Lanes) -> Lanes:
        name = "negate_no_zeros" if whole in self._no_zeros else "negate_bytes"
        word = _word_of(lambda of, mask: f"{name}({of}, {mask})", whole, where)
        return whole._replace(text=_no_single, word=word)

    def points(self, indices: Lanes, table: ByteTable) -> Lanes:
        if table is EVEN_SIGNS:

            def signs(i: int) -> str:
                return f"even_signs(np.uint32({indices.text(str(i // 2))}), {_bits(i % 2 * 4)})"

            return Lanes("bytes", GROUP, _no_single, signs)
        first, width = len(self._rows), table.width
        self._rows += [GridRow(table, indices.text(str(i))) for i in range(GROUP // width)]

        def word(i: int) -> str:
            return f"r{first + 4 * i // width}_{4 * i % width // 4}"

        points = Lanes("bytes", GROUP, _no_single, word)
        self._no_zeros += [points] if table.rows.all() else []
        return points

    def lookup(self, nibbles: Lanes, table: Sequence[int]) -> Lanes:
        words = [
            _bits(sum((v & 255) << 8 * i for i, v in enumerate(table[first : first + 4])))
            for first in range(0, 16, 4)
        ]
        word = _word_of(lambda of: f"look_up({of}, {', '.join(words)})", nibbles)
        return nibbles._replace(text=_no_single, word=word)

    def half(self, ints: Lanes) -> Lanes:
        return Lanes("floats", ints.n, lambda i: f"half_of(np.uint32({ints.text(i)}))")

    # -- weights -------------------------------------------------------------------------------

    def add_two(self, scales: tuple[Lanes, Lanes], q: Lanes, i: int, most: int) -> None:
        assert q.word is not None
        both = scales[0].text("0"), scales[1].text("0")
        words = tuple(q.word(n) for n in range(GROUP // 4))
        self._groups[i] = PackedGroup(both, words, tuple(self._minima_of(i)))

    @property
    def packed_groups(self) -> list[PackedGroup]:
        """The groups, in the order of their weights."""
        return [self._groups[i] for i in sorted(self._groups)]


def _word_of(text: Callable[..., str], *wholes: Lanes) -> Callable[[int], str] | None:
    """The words of what is made of those of others; None if one of these has none."""
    words = [whole.word for whole in wholes if whole.word is not None]
    return (lambda i: text(*(word(i) for word in words))) if len(words) == len(wholes) else None


def _no_single(lane: str) -> str:
    raise TypeError("a single byte, wanted none but in words")


class PackedUnit(NamedTuple):
    """n_groups of a type, in n_bytes."""

    name: str
    n_groups: int
    n_bytes: int


def unit_of(name: str, k: int) -> PackedUnit | None:
    """The unit of rows of k weights of this type; None if they have none."""
    dtype = QUANTS[name].dtype
    n_groups = gcd(k // GROUP, MOST_GROUPS)
    if k % GROUP or GROUP * n_groups % dtype.block:
        return None
    n_bytes = GROUP * n_groups // dtype.block * dtype.block_bytes
    return None if n_bytes % 2 else PackedUnit(name, n_groups, n_bytes)


@cache
def decode_unit(unit: PackedUnit) -> tuple[tuple[PackedGroup, ...], tuple[GridRow, ...]]:
    """The groups of a unit, in the order of its weights, and the rows of grids that they name."""
    quant, groups, rows = QUANTS[unit.name], list[PackedGroup](), list[GridRow]()
    for start in range(0, unit.n_bytes, quant.dtype.block_bytes):
        block = PackedBlock(start, rows)
        quant.decode(block)
        groups += block.packed_groups
    return tuple(groups), tuple(rows)


def has_minima_of_halves(unit: PackedUnit) -> bool:
    """Whether each half of a group has its own minimum."""
    return any(len(group.minima) == 2 for group in decode_unit(unit)[0])


def _tables_of(unit: PackedUnit) -> list[ByteTable]:
    return list(dict.fromkeys(row.table for row in decode_unit(unit)[1]))


@cache
def grid_words_of(unit: PackedUnit) -> np.ndarray:
    """The grids of a unit's type one after the other, uint32 (a multiple of 4,); none for most."""
    rows = [table.rows.reshape(-1) for table in _tables_of(unit)]
    return np.concatenate([np.empty(0, np.int8), *rows]).view(np.uint32)


class Loads:
    """The lines that load the words of a unit at byte `at` of shared memory, each once, and its
    rows of the grids that begin at byte `grids`.

    As many words are loaded at once as the alignment of units allows. Where every other unit begins
    in the middle of a word, a word is what `first` picks of two.
    """

    def __init__(self, unit: PackedUnit) -> None:
        self._alignment = gcd(unit.n_bytes, 16)
        self._loaded: set[int] = set()
        self._rows, self._loaded_rows = decode_unit(unit)[1], set[int]()
        tables = _tables_of(unit)
        starts = np.cumsum([0, *(table.rows.size for table in tables)])
        self._starts = {table: int(start) for table, start in zip(tables, starts[:-1], strict=True)}

    def opening(self) -> list[str]:
        """Where units begin anywhere: the words around, and which bytes of two are one of its."""
        if self._alignment > 2:
            return ["    whole = at"]
        lines = ["    whole = at & ~np.int64(3)"]
        return [*lines, f"    first = {_bits(0x5432)} if at & 2 else {_bits(0x3210)}"]

    def lines(self, expressions: Sequence[str]) -> Iterator[str]:
        """The lines for what these expressions name that is not loaded yet."""
        named = {int(i) for text in expressions for i in re.findall(r"\br(\d+)_", text)}
        new = sorted(named - self._loaded_rows)
        self._loaded_rows |= named
        yield from self._word_lines([*expressions, *(self._rows[i].at for i in new)])
        for i in new:
            table, index = self._rows[i]
            at = f"grids + {self._starts[table]} + {table.width} * np.int64({index})"
            if table.width == 4:
                yield f"    r{i}_0 = shared_word(memory, {at})"
            else:
                yield f"    r{i}_0, r{i}_1 = shared_pair(memory, {at})"

    def _word_lines(self, expressions: Sequence[str]) -> Iterator[str]:
        words = {int(i) for text in expressions for i in re.findall(r"\bw(\d+)\b", text)}
        step = max(1, self._alignment // 4)
        for start in sorted({i // step * step for i in words}):
            if self._alignment > 2:
                yield from self._load("w", start, step)
            elif start not in self._loaded:
                yield from self._load("v", start, 1)
                yield from self._load("v", start + 1, 1)
                yield f"    w{start} = pick_bytes(v{start}, v{start + 1}, first)"
                self._loaded.add(start)

    def _load(self, letter: str, start: int, step: int) -> Iterator[str]:
        key = start if letter == "w" else -1 - start
        if key in self._loaded:
            return
        self._loaded.add(key)
        names = ", ".join(f"{letter}{start + i}" for i in range(step))
        name = {1: "shared_word", 2: "shared_pair", 4: "shared_words"}[step]
        yield f"    {names} = {name}(memory, whole + {4 * start})"


_ONES_OF_WORD = np.uint32(_ONES)


@device
def _mask_of(four):
    """Bytes of 255 for the ones of four bits: each at the top of a byte, then spread over it."""
    tops = four * np.uint32(0x10204080)
    return byte_ptx.pick_bytes(tops, tops, np.uint32(0xBA98))


@device
def _even_signs(seven, first):
    """Bytes of 255 for the bits from `first` on, 0 or 4, of seven and an eighth that makes the
    number of ones even."""
    eight = seven | (byte_ptx.count_ones(seven) << np.uint32(7))
    return _mask_of((eight >> first) & np.uint32(15))


@device
def _negate_bytes(word, where):
    """Bytes, negated where those of `where` are 255; top bits keep what is carried."""
    top, other = np.uint32(0x80808080), word ^ where
    return ((other & ~top) + (where & _ONES_OF_WORD)) ^ (other & top)


@device
def _negate_no_zeros(word, where):
    """The same of bytes of which none is 0: none is carried."""
    return (word ^ where) + (where & _ONES_OF_WORD)


@device
def _spread_pairs(byte):
    """The four fields of two bits of a byte, as bytes."""
    nibbles = (byte | (byte << np.uint32(12))) & np.uint32(0x000F000F)
    return (nibbles | (nibbles << np.uint32(6))) & np.uint32(0x03030303)


@device
def _digits_of(word, power):
    """A digit in base 3 of each byte, the one that `power` of 3 brings to the front."""
    odd, carried = np.uint32(0x00FF00FF), np.uint32(0x00030003)
    low, high = (word & odd) * power & odd, ((word >> np.uint32(8)) & odd) * power & odd
    low, high = low * np.uint32(3) >> np.uint32(8), high * np.uint32(3) >> np.uint32(8)
    return (low & carried) | ((high & carried) << np.uint32(8))


@device
def _look_up(indices, a, b, c, d):
    """Bytes of a table of 16, four in each word; a word has the indices of four."""
    both = indices | (indices >> np.uint32(4))
    which = byte_ptx.pick_bytes(both, both, np.uint32(0x20))  # four bits each
    low, seven = np.uint32(0x01010101), np.uint32(0x7777)
    below, above = (
        byte_ptx.pick_bytes(a, b, which & seven),
        byte_ptx.pick_bytes(c, d, which & seven),
    )
    is_above = ((indices >> np.uint32(3)) & low) * np.uint32(255)
    return (above & is_above) | (below & ~is_above)


def vocabulary() -> dict[str, Any]:
    """What the expressions of groups and the lines that load words name."""
    return {
        "np": np, "as_float": ptx.as_float, "half_e8m0": half_e8m0, "half_of": byte_ptx.half_of,
        "digits_of": _digits_of, "even_signs": _even_signs, "look_up": _look_up,
        "mask_of": _mask_of, "negate_bytes": _negate_bytes, "negate_no_zeros": _negate_no_zeros,
        "pick_bytes": byte_ptx.pick_bytes,
        "spread_pairs": _spread_pairs,
        "shared_pair": byte_ptx.shared_pair, "shared_word": byte_ptx.shared_word,
        "shared_words": byte_ptx.shared_words,
    }  # fmt: skip


def compile_closure(source: str, name: str, scope: Mapping[str, Any]) -> Any:
    """The function of this name and source, with `scope` and the numbers that the source names in
    its closure, where the cache of compiled kernels looks for what makes two of one source
    differ."""
    source, numbers = with_named_numbers(source)
    scope = {**scope, **numbers}
    text = f"def make({', '.join(scope)}):\n{indent(source, '    ')}\n    return {name}"
    names: dict[str, Any] = {}
    exec(compile(text, f"<{name}>", "exec"), names)
    function = names["make"](**scope)
    function.text = source
    return function
