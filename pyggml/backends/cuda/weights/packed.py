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
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.weights.readers import half_e8m0
from pyggml.quants import QUANTS
from pyggml.quants.layout import EVEN_SIGNS, GROUP, SUBGROUP, Block, Table

MOST_GROUPS = 8  # of a unit
_ONES = 0x01010101


class Values(NamedTuple):
    """n numbers: `one(i)` is the expression of number i, `word(i)` that of the i-th four of them.

    kind is "bytes", "ints" or "floats"; only bytes have words. has_zeros: some may be 0.
    """

    kind: str
    n: int
    one: Callable[[int], str]
    word: Callable[[int], str] | None = None
    has_zeros: bool = True


class Group(NamedTuple):
    """Expressions of 32 weights: a scale for each half, eight words, and minima: none, one, or one
    for each half."""

    scales: tuple[str, str]
    words: tuple[str, ...]
    minima: tuple[str, ...]


class GridRow(NamedTuple):
    """Row `at` of a grid, an expression."""

    table: Table
    at: str


def _whole(n: int) -> str:
    return f"np.int32({n})"


def _bits(n: int) -> str:
    return f"np.uint32({n:#x})"


class PackedBlock(Block):
    """Collects the groups of the block that begins at byte `start` of its unit, and in `rows` the
    unit's rows of grids."""

    size = 1  # of plain types, which have no words

    def __init__(self, start: int, rows: list[GridRow]) -> None:
        self._groups: dict[int, Group] = {}
        self._minima: Values | None = None
        self._start, self._rows = start, rows

    # -- reading -------------------------------------------------------------------------------

    def _load(self, offset: int) -> str:
        """Four bytes: a word, or what is in two."""
        i, first = divmod(self._start + offset, 4)
        if not first:
            return f"w{i}"
        return f"pick_bytes(w{i}, w{i + 1}, {_bits(0x3210 + 0x1111 * first)})"

    def _byte(self, offset: int) -> str:
        i, first = divmod(self._start + offset, 4)
        return f"((w{i} >> {_bits(8 * first)}) & {_bits(255)})"

    def _short(self, offset: int) -> str:
        i, first = divmod(self._start + offset, 4)
        if first == 3:
            return f"({self._load(offset)} & {_bits(0xFFFF)})"
        return f"((w{i} >> {_bits(8 * first)}) & {_bits(0xFFFF)})"

    def bytes(self, offset: int, n: int = GROUP) -> Values:
        def one(i: int) -> str:
            return f"np.int32({self._byte(offset + i)})"

        def word(i: int) -> str:
            return self._load(offset + 4 * i)

        return Values("bytes", n, one, word)

    def flags(self, offset: int, value: int) -> Values:
        def one(i: int) -> str:
            byte = f"np.int32({self._byte(offset + i // 8)})"
            return f"((({byte} >> {_whole(i % 8)}) & {_whole(1)}) * {_whole(value)})"

        def word(i: int) -> str:
            four = f"(({self._load(offset)} >> {_bits(4 * i)}) & {_bits(15)})"
            if value == 255:
                return f"mask_of({four})"
            return f"((({four} * {_bits(0x00204081)}) & {_bits(_ONES)}) * {_bits(value)})"

        return Values("bytes", GROUP, one, word)

    def pairs(self, offset: int) -> Values:
        fields = self.fields(offset, 8, 2)
        return Values(
            "bytes", GROUP, fields.one, lambda i: f"spread_pairs({self._byte(offset + i)})"
        )

    def fields(self, offset: int, n_bytes: int, n_bits: int, n: int | None = None) -> Values:
        def one(i: int) -> str:
            at, first = offset + i * n_bits // 8, i * n_bits % 8
            number = self._byte(at)
            if n_bits == 16:
                number = self._short(at)
            elif 8 % n_bits:  # some lie in two bytes
                at, first = offset, i * n_bits
                number = self._load(at) if n_bytes == 4 else self._short(at)
            return f"((np.int32({number}) >> {_whole(first)}) & {_whole((1 << n_bits) - 1)})"

        return Values("ints", n or -(-8 * n_bytes // n_bits), one)

    def f16(self, offset: int, n: int = 1) -> Values:
        return Values("floats", n, lambda i: f"half_of({self._short(offset + 2 * i)})")

    def bf16(self, offset: int, n: int = 1) -> Values:
        return Values(
            "floats", n, lambda i: f"as_float({self._short(offset + 2 * i)} << {_bits(16)})"
        )

    def f32(self, offset: int, n: int = 1) -> Values:
        return Values("floats", n, lambda i: f"as_float({self._load(offset + 4 * i)})")

    def half_e8m0(self, offset: int) -> Values:
        return Values("floats", 1, lambda _: f"half_e8m0(np.uint32({self._byte(offset)}))")

    def constant(self, value: float) -> Values:
        return Values("floats", 1, lambda _: f"np.float32({value})")

    # -- arithmetic ----------------------------------------------------------------------------

    def bits(self, whole: Values, first: int, n: int, to: int = 0) -> Values:
        mask = (1 << n) - 1

        def one(i: int) -> str:
            return f"((({whole.one(i)} >> {_whole(first)}) & {_whole(mask)}) << {_whole(to)})"

        def word(i: int) -> str:
            assert whole.word is not None
            moved = f"(({whole.word(i)} >> {_bits(first)}) & {_bits(mask * _ONES)})"
            return f"({moved} << {_bits(to)})" if to else moved

        return whole._replace(one=one, word=whole.word and word)

    def either(self, a: Values, b: Values) -> Values:
        def word(i: int) -> str:
            assert a.word is not None and b.word is not None
            return f"({a.word(i)} | {b.word(i)})"

        both = a.word and b.word and word
        each = b if b.n > 1 else self.lane(b, 0)
        return a._replace(one=lambda i: f"({a.one(i)} | {each.one(i)})", word=both)

    def join(self, a: Values, b: Values) -> Values:
        def one(i: int) -> str:
            return a.one(i) if i < a.n else b.one(i - a.n)

        def word(i: int) -> str:
            assert a.word is not None and b.word is not None
            return a.word(i) if i < a.n // 4 else b.word(i - a.n // 4)

        return Values(a.kind, a.n + b.n, one, a.word and b.word and word)

    def minus(self, whole: Values, n: int) -> Values:
        def one(i: int) -> str:
            less = f"({whole.one(i)} - {_whole(n)})"
            return f"({less} & {_whole(255)})" if whole.kind == "bytes" else less

        def word(i: int) -> str:  # of bytes below 128: their top bits keep what is borrowed
            assert whole.word is not None
            top = _bits(0x80 * _ONES)
            return f"((({whole.word(i)} | {top}) - {_bits(n * _ONES)}) ^ {top})"

        return whole._replace(one=one, word=whole.word and word)

    def except_for(self, ints: Values, n: int) -> Values:
        return ints._replace(
            one=lambda i: f"({_whole(0)} if {ints.one(i)} == {_whole(n)} else {ints.one(i)})"
        )

    def digits(self, whole: Values, i: int) -> Values:
        def word(n: int) -> str:
            assert whole.word is not None
            return f"digits_of({whole.word(n)}, {_bits(3**i)})"

        return whole._replace(one=_no_single, word=word)

    def negate(self, whole: Values, where: Values) -> Values:
        def word(i: int) -> str:
            assert whole.word is not None and where.word is not None
            name = "negate_bytes" if whole.has_zeros else "negate_no_zeros"
            return f"{name}({whole.word(i)}, {where.word(i)})"

        return whole._replace(one=_no_single, word=word)

    def points(self, indices: Values, table: Table) -> Values:
        if table is EVEN_SIGNS:

            def signs(i: int) -> str:
                return f"even_signs(np.uint32({indices.one(i // 2)}), {_bits(i % 2 * 4)})"

            return Values("bytes", GROUP, _no_single, signs)
        first, width = len(self._rows), table.width
        self._rows += [GridRow(table, indices.one(i)) for i in range(GROUP // width)]

        def word(i: int) -> str:
            return f"r{first + 4 * i // width}_{4 * i % width // 4}"

        return Values("bytes", GROUP, _no_single, word, has_zeros=not table.rows.all())

    def lookup(self, nibbles: Values, table: Sequence[int]) -> Values:
        words = [
            _bits(sum((v & 255) << 8 * i for i, v in enumerate(table[first : first + 4])))
            for first in range(0, 16, 4)
        ]

        def word(i: int) -> str:
            assert nibbles.word is not None
            return f"look_up({nibbles.word(i)}, {', '.join(words)})"

        return nibbles._replace(one=_no_single, word=word)

    def floats(self, whole: Values) -> Values:
        def one(i: int) -> str:
            number = whole.one(i)
            if whole.kind == "bytes":
                number = f"(({number} ^ {_whole(128)}) - {_whole(128)})"
            return f"np.float32(np.int32({number}))"

        return Values("floats", whole.n, one)

    def times(self, floats: Values, factor: Values) -> Values:
        return floats._replace(one=lambda i: f"({floats.one(i)} * {factor.one(0)})")

    def negative(self, floats: Values) -> Values:
        return floats._replace(one=lambda i: f"(-{floats.one(i)})")

    def half(self, ints: Values) -> Values:
        return Values("floats", ints.n, lambda i: f"half_of(np.uint32({ints.one(i)}))")

    def lane(self, numbers: Values, i: int) -> Values:
        return Values(numbers.kind, 1, lambda _: numbers.one(i))

    # -- weights -------------------------------------------------------------------------------

    def add_minimum(self, minimum: Values) -> None:
        self._minima = minimum

    def add_minima(self, minima: Values) -> None:
        self._minima = minima

    def add(self, scale: Values, q: Values, i: int = 0) -> None:
        self.add_two((scale, scale), q, i, most=127)

    def add_two(self, scales: tuple[Values, Values], q: Values, i: int, most: int) -> None:
        assert q.word is not None
        both = scales[0].one(0), scales[1].one(0)
        words = tuple(q.word(n) for n in range(GROUP // 4))
        self._groups[i] = Group(both, words, self._minima_of(i))

    def _minima_of(self, i: int) -> tuple[str, ...]:
        if self._minima is None:
            return ()
        if self._minima.n <= GROUP // 4:
            return (self._minima.one(i // GROUP),)
        return tuple(self._minima.one(i // SUBGROUP + n) for n in range(2))

    @property
    def groups(self) -> list[Group]:
        """The groups, in the order of their weights."""
        return [self._groups[i] for i in sorted(self._groups)]


def _no_single(i: int) -> str:
    raise TypeError("a single byte, wanted none but in words")


class Unit(NamedTuple):
    """n_groups of a type, in n_bytes."""

    name: str
    n_groups: int
    n_bytes: int


def unit_of(name: str, k: int) -> Unit | None:
    """The unit of rows of k weights of this type; None if they have none."""
    dtype = QUANTS[name].dtype
    n_groups = gcd(k // GROUP, MOST_GROUPS)
    if k % GROUP or GROUP * n_groups % dtype.block:
        return None
    n_bytes = GROUP * n_groups // dtype.block * dtype.block_bytes
    return None if n_bytes % 2 else Unit(name, n_groups, n_bytes)


@cache
def decode_unit(unit: Unit) -> tuple[tuple[Group, ...], tuple[GridRow, ...]]:
    """The groups of a unit, in the order of its weights, and the rows of grids that they name."""
    quant, groups, rows = QUANTS[unit.name], list[Group](), list[GridRow]()
    for start in range(0, unit.n_bytes, quant.dtype.block_bytes):
        block = PackedBlock(start, rows)
        quant.decode(block)
        groups += block.groups
    return tuple(groups), tuple(rows)


def has_minima_of_halves(unit: Unit) -> bool:
    """Whether each half of a group has its own minimum."""
    return any(len(group.minima) == 2 for group in decode_unit(unit)[0])


def _tables_of(unit: Unit) -> list[Table]:
    return list(dict.fromkeys(row.table for row in decode_unit(unit)[1]))


@cache
def grid_words_of(unit: Unit) -> np.ndarray:
    """The grids of a unit's type one after the other, uint32 (a multiple of 4,); none for most."""
    rows = [table.rows.reshape(-1) for table in _tables_of(unit)]
    return np.concatenate([np.empty(0, np.int8), *rows]).view(np.uint32)


class Loads:
    """The lines that load the words of a unit at byte `at` of shared memory, each once, and its
    rows of the grids that begin at byte `grids`.

    As many words are loaded at once as the alignment of units allows. Where every other unit begins
    in the middle of a word, a word is what `first` picks of two.
    """

    def __init__(self, unit: Unit) -> None:
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
    eight = seven | (np.uint32(cuda.popc(seven)) << np.uint32(7))
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


def compile_closure(source: str, name: str, known: Mapping[str, Any]) -> Any:
    """The function of this name and source, with `known` in its closure, where the cache of
    compiled kernels looks for what makes two of one source differ."""
    body = indent(source, "    ")
    text = f"def make({', '.join(known)}):\n{body}\n    return {name}"
    made: dict[str, Any] = {}
    exec(compile(text, f"<{name}>", "exec"), made)
    return made["make"](**known)
