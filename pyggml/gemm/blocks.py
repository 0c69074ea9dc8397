"""What lies in a block of each weight type, as vectors of whole numbers and scales.

Every type's code gets a `Block` and tells it the weights, WIDE at a time, as scale·q + low. What is
done with them, the Block decides: pyggml.gemm.dots multiplies them, in floats or in integers, and
pyggml.gemm.int8_tile unpacks them for a tile. How the bytes lie is said in pyggml.quants.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from pyggml._llvm import F32, I8, I16, I32, I64, broadcast, every, from_halves
from pyggml.quants.iq4 import VALUES

GROUP = 16  # numbers that have one scale in every type, and fill a vector of floats
WIDE = 32  # numbers that are handled at a time; a step of types whose own blocks are shorter
FLOATS = ir.VectorType(F32, GROUP)
EIGHT = ir.VectorType(F32, 8)
_BYTES = ir.VectorType(I8, WIDE)
_INTS = ir.VectorType(I32, GROUP)
_IQ4_VALUES = [int(v) for v in VALUES]
_FP4_VALUES = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]


class Block(ABC):
    """The block of a row that a loop stands at; what becomes of its weights is a subclass's matter.

    Weights are WIDE signed bytes until their last step: that is cheaper than wider integers.
    """

    def __init__(self, builder: Any, source: Any) -> None:
        self.b = builder
        self._source = builder.inttoptr(source, I8.as_pointer())

    # -- what lies in the block ----------------------------------------------------------------

    def read(self, offset: int, kind: Any) -> Any:
        """A value of this LLVM type from byte `offset`."""
        place = self.b.gep(self._source, [ir.Constant(I64, offset)])
        value = self.b.load(self.b.bitcast(place, kind.as_pointer()))
        value.align = 1
        return value

    def half(self, offset: int) -> Any:
        """The float of the half at byte `offset`."""
        return from_halves(self.b, self.read(offset, ir.HalfType()), F32)

    def bytes(self, offset: int) -> Any:
        """WIDE bytes."""
        return self.read(offset, _BYTES)

    def nibbles(self, offset: int) -> Any:
        """The low 4 bits of 16 bytes, then the high ones."""
        both = self.read(offset, ir.VectorType(I8, GROUP))
        parts = self.bits(both, 0, 4), self.bits(both, 4, 4)
        return self.b.shuffle_vector(*parts, ir.Constant(ir.VectorType(I32, WIDE), [*range(WIDE)]))

    # -- arithmetic on integers, of any width --------------------------------------------------

    def bits(self, ints: Any, low: int, n: int, to: int = 0) -> Any:
        """Bits low … low + n of each, where bit `to` and those above it are."""
        b, kind, mask = self.b, ints.type, ((1 << n) - 1) << to
        if to < low:
            ints = b.lshr(ints, every(kind, low - to))
        elif to > low:
            ints = b.shl(ints, every(kind, to - low))
        return b.and_(ints, every(kind, mask))

    def spread(self, word: Any, steps: Sequence[int], n: int) -> Any:
        """n bits of one 32-bit word from each of these places, in a vector."""
        kind = ir.VectorType(I32, len(steps))
        shifted = self.b.lshr(broadcast(self.b, word, kind), ir.Constant(kind, list(steps)))
        return self.b.and_(shifted, every(kind, (1 << n) - 1))

    def lookup(self, nibbles: Any, table: Sequence[int]) -> Any:
        """table[i] for bytes i below 16: each bit halves what is left of the table."""
        left = [every(_BYTES, v) for v in table]
        for bit in range(4):
            is_set = self.b.icmp_unsigned("!=", self.bits(nibbles, bit, 1), every(_BYTES, 0))
            pairs = zip(left[::2], left[1::2], strict=True)
            left = [self.b.select(is_set, odd, even) for even, odd in pairs]
        return left[0]

    def less(self, ints: Any, n: int) -> Any:
        return self.b.sub(ints, every(ints.type, n))

    def floats(self, ints: Any) -> Any:
        return self.b.sitofp(ints, ir.VectorType(F32, ints.type.count))

    def halves(self, q: Any) -> list[Any]:
        """The first and the last GROUP of WIDE weights, as floats."""
        places = (range(GROUP), range(GROUP, WIDE))
        masks = (ir.Constant(_INTS, list(some)) for some in places)
        return [self.floats(self.b.shuffle_vector(q, q, mask)) for mask in masks]

    def lane(self, vector: Any, i: int) -> Any:
        return self.b.extract_element(vector, ir.Constant(I32, i))

    # -- what the weights are, w = scale·q + low; number i of the block is the first of them ----
    # A block's lows are told before its other parts.

    @abstractmethod
    def add(self, scale: Any, q: Any, i: int = 0) -> None:
        """WIDE weights scale·q."""

    @abstractmethod
    def add_two(self, scales: tuple[Any, Any], q: Any, i: int) -> None:
        """The same with one scale for the first GROUP and one for the others."""

    @abstractmethod
    def add_low(self, low: Any) -> None:
        """A low of the block's first WIDE weights."""

    @abstractmethod
    def add_lows(self, lows: Any) -> None:
        """Lows of 8 times WIDE weights, the first of them at the block's beginning."""


class FloatBlock(Block):
    """One that also takes weights that are floats already."""

    @abstractmethod
    def add_floats(self, floats: Any, i: int) -> None:
        """GROUP weights."""


# -- the types ------------------------------------------------------------------------------------


def _q8_0(block: Block) -> None:
    block.add(block.half(0), block.bytes(2))


def _q4_0(block: Block) -> None:
    block.add(block.half(0), block.less(block.nibbles(2), 8))


def _add_with_low(block: Block, q: Any) -> None:
    """Weights d·q + m, d and m being the first two halves."""
    block.add_low(block.half(2))
    block.add(block.half(0), q)


def _q4_1(block: Block) -> None:
    _add_with_low(block, block.nibbles(4))


def _with_fifth_bits(block: Block, word: int, nibbles: int) -> Any:
    """Nibbles with the bits of a word on top; bytes where both lie."""
    b, flags = block.b, ir.VectorType(ir.IntType(1), WIDE)
    tops = b.select(block.read(word, flags), every(_BYTES, 16), every(_BYTES, 0))
    return b.or_(block.nibbles(nibbles), tops)


def _q5_0(block: Block) -> None:
    block.add(block.half(0), block.less(_with_fifth_bits(block, 2, 6), 16))


def _q5_1(block: Block) -> None:
    _add_with_low(block, _with_fifth_bits(block, 4, 8))


def _iq4_nl(block: Block) -> None:
    block.add(block.half(0), block.lookup(block.nibbles(2), _IQ4_VALUES))


def _iq4_xs(block: Block) -> None:
    b = block.b
    low = block.spread(block.read(4, I32), range(0, 32, 4), 4)
    high = block.spread(b.zext(block.read(2, I16), I32), range(0, 16, 2), 2)
    eight = block.less(b.or_(low, block.bits(high, 0, 2, to=4)), 32)
    scales = block.floats(eight)
    scales = b.fmul(scales, broadcast(b, block.half(0), scales.type))
    for i in range(8):
        q = block.lookup(block.nibbles(8 + 16 * i), _IQ4_VALUES)
        block.add(block.lane(scales, i), q, 32 * i)


def _mxfp4(block: Block) -> None:
    b, e = block.b, block.b.zext(block.read(0, I8), I32)
    small = b.shl(ir.Constant(I32, 0x00200000), e)  # 2^(e−128) is subnormal
    usual = b.shl(b.sub(e, ir.Constant(I32, 1)), ir.Constant(I32, 23))
    d = b.bitcast(b.select(b.icmp_unsigned("<", e, ir.Constant(I32, 2)), small, usual), F32)
    block.add(d, block.lookup(block.nibbles(1), _FP4_VALUES))


def _k_scales(block: Block) -> tuple[Any, Any]:
    """The scales and the lows of Q4_K's and Q5_K's 8 groups of 32."""
    b, mask4 = block.b, ir.Constant(I32, 0x0F0F0F0F)
    first, second, third = (block.read(4 + 4 * i, I32) for i in range(3))

    def six(word: Any) -> Any:
        return b.and_(word, ir.Constant(I32, 0x3F3F3F3F))

    def joined(four: Any, two: Any) -> Any:
        top = b.and_(b.lshr(two, ir.Constant(I32, 2)), ir.Constant(I32, 0x30303030))
        return b.or_(b.and_(four, mask4), top)

    upper = b.lshr(third, ir.Constant(I32, 4))
    scales = _k_floats(block, block.half(0), six(first), joined(third, first))
    lows = _k_floats(block, b.fneg(block.half(2)), six(second), joined(upper, second))
    return scales, lows


def _k_floats(block: Block, factor: Any, *words: Any) -> Any:
    """The eight bytes of two words, as floats, times a factor."""
    pair = ir.Constant(ir.VectorType(I32, 2), ir.Undefined)
    for i, word in enumerate(words):
        pair = block.b.insert_element(pair, word, ir.Constant(I32, i))
    whole = block.b.zext(block.b.bitcast(pair, ir.VectorType(I8, 8)), ir.VectorType(I32, 8))
    return block.b.fmul(block.floats(whole), broadcast(block.b, factor, EIGHT))


def _q4_k(block: Block) -> None:
    scales, lows = _k_scales(block)
    block.add_lows(lows)
    for i in range(8):
        q = block.bytes(16 + i // 2 * 32)  # of two groups
        block.add(block.lane(scales, i), block.bits(q, i % 2 * 4, 4), 32 * i)


def _q5_k(block: Block) -> None:
    scales, lows = _k_scales(block)
    block.add_lows(lows)
    fifth = block.bytes(16)
    for i in range(8):
        q = block.bits(block.bytes(48 + i // 2 * 32), i % 2 * 4, 4)
        block.add(block.lane(scales, i), block.b.or_(q, block.bits(fifth, i, 1, to=4)), 32 * i)


def _q6_k(block: Block) -> None:
    b = block.b
    scales = block.floats(block.read(192, ir.VectorType(I8, GROUP)))
    scales = b.fmul(scales, broadcast(b, block.half(208), FLOATS))
    for i in range(8):  # groups of 32, four of them in 64 + 32 bytes
        half, k = divmod(i, 4)
        low = block.bits(block.bytes(64 * half + k % 2 * 32), k // 2 * 4, 4)
        high = block.bits(block.bytes(128 + 32 * half), 2 * k, 2, to=4)
        both = block.lane(scales, 2 * i), block.lane(scales, 2 * i + 1)
        block.add_two(both, block.less(b.or_(low, high), 32), 32 * i)


def _f16(block: FloatBlock) -> None:
    for i in range(0, WIDE, GROUP):
        halves = block.read(2 * i, ir.VectorType(ir.HalfType(), GROUP))
        block.add_floats(from_halves(block.b, halves, FLOATS), i)


def _bf16(block: FloatBlock) -> None:
    for i in range(0, WIDE, GROUP):
        upper = block.b.zext(block.read(2 * i, ir.VectorType(I16, GROUP)), _INTS)
        bits = block.b.shl(upper, every(_INTS, 16))
        block.add_floats(block.b.bitcast(bits, FLOATS), i)


def _f32(block: FloatBlock) -> None:
    for i in range(0, WIDE, GROUP):
        block.add_floats(block.read(4 * i, FLOATS), i)


WHOLE: dict[str, Callable[[Block], None]] = {  # types of whole numbers
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
Emit = Callable[[FloatBlock], None]
EMIT: dict[str, Emit] = {"F32": _f32, "F16": _f16, "BF16": _bf16, **WHOLE}
