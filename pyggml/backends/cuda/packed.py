"""Weights of a block as whole numbers, four to a word: for the products of gemm/packed_dots.py.

`PackedBlock` runs a decoder (pyggml.quants.layout) and writes down, for each group of 32 weights,
the expressions of its scales, its minimum and its words: word q of the first half has the bytes 4q
to 4q + 3, of the second half 16 + 4q to 16 + 4q + 3, for q from 0 to 3. A lane takes both words of
its own q, which in most types come from the same four bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from textwrap import indent
from typing import Any, NamedTuple

import numpy as np

from pyggml._jit import BlockCode
from pyggml.backends.cuda import byte_ptx, ptx
from pyggml.backends.cuda.driver import device
from pyggml.backends.cuda.formulas import ZERO
from pyggml.backends.cuda.weights import half_e8m0
from pyggml.quants import QUANTS
from pyggml.quants.layout import GROUP, SUBGROUP, Block

_ONES = 0x01010101


class Values(NamedTuple):
    """n numbers: `one(i)` is the expression of number i, `word(half)` that of four bytes.

    kind is "bytes", "ints" or "floats"; only GROUP or SUBGROUP bytes have words.
    """

    kind: str
    n: int
    one: Callable[[int], str]
    word: Callable[[int], str] | None = None


class Group(NamedTuple):
    """Expressions of 32 weights: a scale for each half, the words of each, and a minimum or ''."""

    scales: tuple[str, str]
    words: tuple[str, str]
    minimum: str


def _whole(n: int) -> str:
    return f"np.int32({n})"


def _bits(n: int) -> str:
    return f"np.uint32({n:#x})"


class PackedBlock(Block):
    """Collects the groups of a block of so many bytes."""

    size = 1  # of plain types, which have no words

    def __init__(self, block_bytes: int) -> None:
        self._groups: dict[int, Group] = {}
        self._minima: Values | None = None
        self._block_bytes = block_bytes

    # -- reading -------------------------------------------------------------------------------

    def _load(self, offset: int, start: str = "at") -> str:
        """Four bytes, by as few loads as their alignment allows."""
        both = offset | self._block_bytes
        name = "load_word" if both % 4 == 0 else "load_shorts" if both % 2 == 0 else "load_bytes"
        return f"{name}(raw, {start} + {offset})"

    def _byte(self, offset: int) -> str:
        """One byte, of four that are read at once where they can be."""
        if self._block_bytes % 4:
            return f"np.int32(load_byte(raw, at + {offset}))"
        word, shift = f"load_word(raw, at + {offset & ~3})", 8 * (offset & 3)
        return f"np.int32(({word} >> {_bits(shift)}) & {_bits(255)})"

    def bytes(self, offset: int, n: int = GROUP) -> Values:
        def one(i: int) -> str:
            return self._byte(offset + i)

        def word(half: int) -> str:
            return self._load(offset + 16 * half, "own")

        return Values("bytes", n, one, word if n >= SUBGROUP else None)

    def nibbles(self, offset: int) -> Values:
        both = self.bytes(offset, SUBGROUP)
        return self.join(self.bits(both, 0, 4), self.bits(both, 4, 4))

    def flags(self, offset: int, value: int) -> Values:
        def one(i: int) -> str:
            bit = f"(({self._byte(offset + i // 8)} >> {_whole(i % 8)}) & {_whole(1)})"
            return f"({bit} * {_whole(value)})"

        def word(half: int) -> str:
            shift = f"(np.uint32(4 * q) + {_bits(16 * half)})"
            four = f"(({self._load(offset)} >> {shift}) & {_bits(15)})"
            return f"((({four} * {_bits(0x00204081)}) & {_bits(_ONES)}) * {_bits(value)})"

        return Values("bytes", GROUP, one, word)

    def fields(self, offset: int, n_bytes: int, n_bits: int) -> Values:
        def one(i: int) -> str:
            first = i * n_bits
            byte = self._byte(offset + first // 8)
            return f"(({byte} >> {_whole(first % 8)}) & {_whole((1 << n_bits) - 1)})"

        return Values("ints", 8 * n_bytes // n_bits, one)

    def f16(self, offset: int, n: int = 1) -> Values:
        return Values("floats", n, lambda i: f"load_half(raw, at + {offset + 2 * i})")

    def bf16(self, offset: int, n: int = 1) -> Values:
        def one(i: int) -> str:
            return f"as_float(load_short(raw, at + {offset + 2 * i}) << {_bits(16)})"

        return Values("floats", n, one)

    def f32(self, offset: int, n: int = 1) -> Values:
        return Values("floats", n, lambda i: f"as_float({self._load(offset + 4 * i)})")

    def half_e8m0(self, offset: int) -> Values:
        return Values("floats", 1, lambda _: f"half_e8m0(load_byte(raw, at + {offset}))")

    # -- arithmetic ----------------------------------------------------------------------------

    def bits(self, whole: Values, first: int, n: int, to: int = 0) -> Values:
        mask = (1 << n) - 1

        def one(i: int) -> str:
            return f"((({whole.one(i)} >> {_whole(first)}) & {_whole(mask)}) << {_whole(to)})"

        def word(half: int) -> str:
            assert whole.word is not None
            moved = f"(({whole.word(half)} >> {_bits(first)}) & {_bits(mask * _ONES)})"
            return f"({moved} << {_bits(to)})" if to else moved

        return whole._replace(one=one, word=whole.word and word)

    def either(self, a: Values, b: Values) -> Values:
        def word(half: int) -> str:
            assert a.word is not None and b.word is not None
            return f"({a.word(half)} | {b.word(half)})"

        both = a.word and b.word and word
        return a._replace(one=lambda i: f"({a.one(i)} | {b.one(i)})", word=both)

    def join(self, a: Values, b: Values) -> Values:
        def one(i: int) -> str:
            return a.one(i) if i < a.n else b.one(i - a.n)

        def word(half: int) -> str:
            found = b.word if half else a.word
            assert found is not None
            return found(0)

        return Values(a.kind, a.n + b.n, one, word if a.n == SUBGROUP else None)

    def minus(self, whole: Values, n: int) -> Values:
        def one(i: int) -> str:
            less = f"({whole.one(i)} - {_whole(n)})"
            return f"({less} & {_whole(255)})" if whole.kind == "bytes" else less

        def word(half: int) -> str:  # of bytes below 128: their top bits keep what is borrowed
            assert whole.word is not None
            top = _bits(0x80 * _ONES)
            return f"((({whole.word(half)} | {top}) - {_bits(n * _ONES)}) ^ {top})"

        return whole._replace(one=one, word=whole.word and word)

    def lookup(self, nibbles: Values, table: Sequence[int]) -> Values:
        words = [
            _bits(sum((v & 255) << 8 * i for i, v in enumerate(table[first : first + 4])))
            for first in range(0, 16, 4)
        ]

        def word(half: int) -> str:
            assert nibbles.word is not None
            return f"look_up({nibbles.word(half)}, {', '.join(words)})"

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

    def lane(self, floats: Values, i: int) -> Values:
        return Values("floats", 1, lambda _: floats.one(i))

    # -- weights -------------------------------------------------------------------------------

    def add_minimum(self, minimum: Values) -> None:
        self._minima = minimum

    def add_minima(self, minima: Values) -> None:
        self._minima = minima

    def add(self, scale: Values, q: Values, i: int = 0) -> None:
        self.add_two((scale, scale), q, i)

    def add_two(self, scales: tuple[Values, Values], q: Values, i: int) -> None:
        assert q.word is not None
        minimum = self._minima.one(i // GROUP) if self._minima else ""
        both = scales[0].one(0), scales[1].one(0)
        self._groups[i] = Group(both, (q.word(0), q.word(1)), minimum)

    @property
    def groups(self) -> list[Group]:
        """The groups, in the order of their weights."""
        return [self._groups[i] for i in sorted(self._groups)]


def _no_single(i: int) -> str:
    raise TypeError("a number of a table, wanted none but in words")


@cache
def groups_of(name: str) -> tuple[Group, ...]:
    """The groups of a block of the type of this name."""
    quant = QUANTS[name]
    assert not isinstance(quant.decode, BlockCode), f"{name} has no decoder"
    block = PackedBlock(quant.dtype.block_bytes)
    quant.decode(block)
    return tuple(block.groups)


def source_of(name: str) -> str:
    """The source of `unpack(raw, at, q)`: lane q's share of each group of the block at byte `at`, a
    tuple (word, word, scale, scale, minimum)."""
    lines = ["def unpack(raw, at, q):", "    own = at + 4 * q", "    return ("]
    for group in groups_of(name):
        parts = (*group.words, *group.scales, group.minimum or "ZERO")
        lines += ["        (", *(f"            {part}," for part in parts), "        ),"]
    return "\n".join([*lines, "    )"])


@device
def _load_shorts(raw, at):
    return byte_ptx.shared_short(raw, at) | (byte_ptx.shared_short(raw, at + 2) << np.uint32(16))


@device
def _load_bytes(raw, at):
    low = byte_ptx.shared_byte(raw, at) | (byte_ptx.shared_byte(raw, at + 1) << np.uint32(8))
    high = byte_ptx.shared_byte(raw, at + 2) | (byte_ptx.shared_byte(raw, at + 3) << np.uint32(8))
    return low | (high << np.uint32(16))


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


@cache
def unpacker_of(name: str) -> Any:
    """`unpack` as a device function of blocks in shared memory."""
    known = {
        "np": np, "ZERO": ZERO, "as_float": ptx.as_float, "half_e8m0": half_e8m0,
        "load_byte": byte_ptx.shared_byte, "load_short": byte_ptx.shared_short, "look_up": _look_up,
        "load_half": byte_ptx.shared_half, "load_word": byte_ptx.shared_word,
        "load_shorts": _load_shorts, "load_bytes": _load_bytes,
    }  # fmt: skip
    return device(closed(source_of(name), "unpack", known))


def closed(source: str, name: str, known: Mapping[str, Any]) -> Any:
    """The function of this name and source, with `known` in its closure, where the cache of
    compiled kernels looks for what makes two of one source differ."""
    body = indent(source, "    ")
    text = f"def make({', '.join(known)}):\n{body}\n    return {name}"
    made: dict[str, Any] = {}
    exec(compile(text, f"<{name}>", "exec"), made)
    return made["make"](**known)
