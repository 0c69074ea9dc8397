"""Weights of a unit as whole numbers, four to a word: for the products of gemm/packed_dots.py.

A unit is what one thread multiplies: at most eight groups of 32 weights, in one block or several.
`PackedBlock` runs a decoder (pyggml.quants.layout) and writes down, for each group, the expressions
of its scales, its minimum and its eight words, of the unit's own words w0, w1, …
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
from pyggml.backends.cuda.weights.readers import half_e8m0
from pyggml.quants import QUANTS
from pyggml.quants.layout import GROUP, SUBGROUP, Block

MOST_GROUPS = 8  # of a unit
_ONES = 0x01010101


class Values(NamedTuple):
    """n numbers: `one(i)` is the expression of number i, `word(i)` that of the i-th four of them.

    kind is "bytes", "ints" or "floats"; only GROUP or SUBGROUP bytes have words.
    """

    kind: str
    n: int
    one: Callable[[int], str]
    word: Callable[[int], str] | None = None


class Group(NamedTuple):
    """Expressions of 32 weights: a scale for each half, eight words, and minima: none, one, or one
    for each half."""

    scales: tuple[str, str]
    words: tuple[str, ...]
    minima: tuple[str, ...]


def _whole(n: int) -> str:
    return f"np.int32({n})"


def _bits(n: int) -> str:
    return f"np.uint32({n:#x})"


class PackedBlock(Block):
    """Collects the groups of the block that begins at byte `start` of its unit. It has the reading
    and the arithmetic of direct types only: others have no units."""

    size = 1  # of plain types, which have no words

    def __init__(self, start: int) -> None:
        self._groups: dict[int, Group] = {}
        self._minima: Values | None = None
        self._start = start

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

        return Values("bytes", n, one, word if n >= SUBGROUP else None)

    def flags(self, offset: int, value: int) -> Values:
        def one(i: int) -> str:
            byte = f"np.int32({self._byte(offset + i // 8)})"
            return f"((({byte} >> {_whole(i % 8)}) & {_whole(1)}) * {_whole(value)})"

        def word(i: int) -> str:
            four = f"(({self._load(offset)} >> {_bits(4 * i)}) & {_bits(15)})"
            return f"((({four} * {_bits(0x00204081)}) & {_bits(_ONES)}) * {_bits(value)})"

        return Values("bytes", GROUP, one, word)

    def fields(self, offset: int, n_bytes: int, n_bits: int, n: int | None = None) -> Values:
        def one(i: int) -> str:
            first = i * n_bits
            byte = f"np.int32({self._byte(offset + first // 8)})"
            return f"(({byte} >> {_whole(first % 8)}) & {_whole((1 << n_bits) - 1)})"

        return Values("ints", n or 8 * n_bytes // n_bits, one)

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
        return a._replace(one=lambda i: f"({a.one(i)} | {b.one(i)})", word=both)

    def join(self, a: Values, b: Values) -> Values:
        def one(i: int) -> str:
            return a.one(i) if i < a.n else b.one(i - a.n)

        def word(i: int) -> str:
            assert a.word is not None and b.word is not None
            return a.word(i) if i < a.n // 4 else b.word(i - a.n // 4)

        return Values(a.kind, a.n + b.n, one, word if a.n == SUBGROUP else None)

    def minus(self, whole: Values, n: int) -> Values:
        def one(i: int) -> str:
            less = f"({whole.one(i)} - {_whole(n)})"
            return f"({less} & {_whole(255)})" if whole.kind == "bytes" else less

        def word(i: int) -> str:  # of bytes below 128: their top bits keep what is borrowed
            assert whole.word is not None
            top = _bits(0x80 * _ONES)
            return f"((({whole.word(i)} | {top}) - {_bits(n * _ONES)}) ^ {top})"

        return whole._replace(one=one, word=whole.word and word)

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

    def lane(self, numbers: Values, i: int) -> Values:
        return Values(numbers.kind, 1, lambda _: numbers.one(i))

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("only types whose products read blocks as they lie have units")

    pairs = constant = except_for = digits = negate = points = half = _refuse

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
    raise TypeError("a number of a table, wanted none but in words")


class Unit(NamedTuple):
    """n_groups of a type, in n_bytes."""

    name: str
    n_groups: int
    n_bytes: int


def unit_of(name: str, k: int) -> Unit | None:
    """The unit of rows of k weights of this type; None if they have none."""
    dtype = QUANTS[name].dtype
    n_groups = gcd(k // GROUP, MOST_GROUPS)
    if not QUANTS[name].direct or k % GROUP or GROUP * n_groups % dtype.block:
        return None
    n_bytes = GROUP * n_groups // dtype.block * dtype.block_bytes
    return None if n_bytes % 2 else Unit(name, n_groups, n_bytes)


@cache
def groups_of(unit: Unit) -> tuple[Group, ...]:
    """The groups of a unit, in the order of its weights."""
    quant, groups = QUANTS[unit.name], list[Group]()
    for start in range(0, unit.n_bytes, quant.dtype.block_bytes):
        block = PackedBlock(start)
        quant.decode(block)
        groups += block.groups
    return tuple(groups)


class Loads:
    """The lines that load the words of a unit at byte `at` of shared memory, each once.

    As many words are loaded at once as the alignment of units allows. Where every other unit begins
    in the middle of a word, a word is what `first` picks of two.
    """

    def __init__(self, unit: Unit) -> None:
        self._alignment = gcd(unit.n_bytes, 16)
        self._loaded: set[int] = set()

    def opening(self) -> list[str]:
        """Where units begin anywhere: the words around, and which bytes of two are one of its."""
        if self._alignment > 2:
            return ["    whole = at"]
        lines = ["    whole = at & ~np.int64(3)"]
        return [*lines, f"    first = {_bits(0x5432)} if at & 2 else {_bits(0x3210)}"]

    def lines(self, expressions: Sequence[str]) -> Iterator[str]:
        """The lines for the words in these expressions that are not loaded yet."""
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
        "look_up": _look_up, "pick_bytes": byte_ptx.pick_bytes,
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
