"""What lies in a block of each weight type, as vectors of whole numbers and scales; for dots.py.

Every type's code gets a `Block` and says which products it adds up, 16 numbers at a time; LLVM cuts
them to the CPU's width. How the bytes lie is said in pyggml.quants; floats come out as there, but
for the order of the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from typing import Any

from llvmlite import ir

from pyggml.gemm.vectors import F32, I8, I16, I32, I64, broadcast, every, fma
from pyggml.quants.iq4 import VALUES

GROUP = 16  # numbers of one vector, and of one Σ x
LEAST = 32  # numbers in a step of a type whose own blocks are shorter
FLOATS = ir.VectorType(F32, GROUP)
_INTS = ir.VectorType(I32, GROUP)
_IQ4_VALUES = [int(v) for v in VALUES]
_FP4_VALUES = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]


class Block:
    """The block of a row that the loop stands at, and the numbers of x that it multiplies."""

    def __init__(self, builder: Any, chains: list[Any], source: Any, x: Any, sums: Any) -> None:
        self.b, self._x, self._group_sums = builder, x, sums
        self._source = builder.inttoptr(source, I8.as_pointer())
        self._chains = cycle(chains)

    # -- what lies in the block ----------------------------------------------------------------

    def read(self, offset: int, kind: Any) -> Any:
        """A value of this LLVM type from byte `offset`."""
        place = self.b.gep(self._source, [ir.Constant(I64, offset)])
        value = self.b.load(self.b.bitcast(place, kind.as_pointer()))
        value.align = 1
        return value

    def half(self, offset: int) -> Any:
        """The float of the half at byte `offset`."""
        return self.b.fpext(self.read(offset, ir.HalfType()), F32)

    def bytes(self, offset: int) -> Any:
        """GROUP unsigned bytes, as integers."""
        return self.b.zext(self.read(offset, ir.VectorType(I8, GROUP)), _INTS)

    def signed(self, offset: int) -> Any:
        """GROUP signed bytes, as integers."""
        return self.b.sext(self.read(offset, ir.VectorType(I8, GROUP)), _INTS)

    # -- arithmetic on integers ----------------------------------------------------------------

    def bits(self, ints: Any, low: int, n: int) -> Any:
        """Bits low … low + n of each."""
        shifted = self.b.lshr(ints, every(_INTS, low)) if low else ints
        return self.b.and_(shifted, every(_INTS, (1 << n) - 1))

    def high_bits(self, ints: Any, low: int, n: int, to: int) -> Any:
        """The same bits, where bit `to` and those above it are."""
        return self.b.shl(self.bits(ints, low, n), every(_INTS, to))

    def nibbles(self, offset: int) -> tuple[Any, Any]:
        """The low and the high 4 bits of GROUP bytes."""
        both = self.bytes(offset)
        return self.bits(both, 0, 4), self.bits(both, 4, 4)

    def spread(self, word: Any, steps: Sequence[int], n: int) -> Any:
        """n bits of one 32-bit word from each of these places, in a vector."""
        kind = ir.VectorType(I32, len(steps))
        shifted = self.b.lshr(broadcast(self.b, word, kind), ir.Constant(kind, list(steps)))
        return self.b.and_(shifted, every(kind, (1 << n) - 1))

    def lookup(self, indices: Any, table: Sequence[int]) -> Any:
        """table[i], 16 numbers from -128 to 127: four words of four bytes, and shifts."""
        b, raised = self.b, bytes(v + 128 for v in table)
        words = [every(_INTS, int.from_bytes(raised[i : i + 4], "little")) for i in (0, 4, 8, 12)]

        def below(limit: int, one: Any, other: Any) -> Any:
            return b.select(b.icmp_unsigned("<", indices, every(_INTS, limit)), one, other)

        word = below(8, below(4, *words[:2]), below(12, *words[2:]))
        shift = b.shl(self.bits(indices, 0, 2), every(_INTS, 3))
        return self.less(b.and_(b.lshr(word, shift), every(_INTS, 255)), 128)

    def less(self, ints: Any, n: int) -> Any:
        return self.b.sub(ints, every(_INTS, n))

    def floats(self, ints: Any) -> Any:
        return self.b.sitofp(ints, ir.VectorType(F32, ints.type.count))

    # -- sums ----------------------------------------------------------------------------------

    def add(self, scale: Any, parts: Iterable[tuple[Any, int]]) -> None:
        """scale · Σ q x over pairs of 16 integers q and the index of x that the first meets."""
        part = every(FLOATS, 0.0)
        for ints, i in parts:
            part = fma(self.b, self.floats(ints), self._floats_at(self._x, i), part)
        self._sum(part, broadcast(self.b, scale, FLOATS))

    def add_floats(self, floats: Any, i: int) -> None:
        """Σ w x of 16 weights that are floats."""
        self._sum(floats, self._floats_at(self._x, i))

    def add_lows(self, lows: Any) -> None:
        """Σ low · Σ x over 16 groups, the first of them at the block's beginning."""
        self._sum(lows, self._floats_at(self._group_sums, 0))

    def _floats_at(self, base: Any, i: int) -> Any:
        place = self.b.inttoptr(self.b.add(base, ir.Constant(I64, 4 * i)), FLOATS.as_pointer())
        value = self.b.load(place)
        value.align = 4
        return value

    def _sum(self, a: Any, b: Any) -> None:
        sums = next(self._chains)
        self.b.store(fma(self.b, a, b, self.b.load(sums)), sums)

    def lane(self, vector: Any, i: int) -> Any:
        return self.b.extract_element(vector, ir.Constant(I32, i))


# -- the types ------------------------------------------------------------------------------------


def _q8_0(block: Block) -> None:
    block.add(block.half(0), _halves(block.signed(2), block.signed(18)))


def _halves(*ints: Any) -> list[tuple[Any, int]]:
    """What the two halves of a block of 32 meet of x."""
    return list(zip(ints, (0, 16), strict=True))


def _q4_0(block: Block) -> None:
    block.add(block.half(0), _halves(*(block.less(q, 8) for q in block.nibbles(2))))


def _add_with_low(block: Block, ints: Iterable[Any]) -> None:
    """Weights d·q + m, d and m being the first two halves."""
    d, m = (broadcast(block.b, block.half(i), FLOATS) for i in (0, 2))
    for q, i in _halves(*ints):
        block.add_floats(fma(block.b, block.floats(q), d, m), i)


def _q4_1(block: Block) -> None:
    _add_with_low(block, block.nibbles(4))


def _with_fifth_bits(block: Block, word: int, nibbles: int) -> list[Any]:
    """Nibbles with the bits of a word on top; bytes where both lie."""
    bits, found = block.read(word, I32), []
    for q, first in zip(block.nibbles(nibbles), (0, 16), strict=True):
        top = block.spread(bits, range(first, first + GROUP), 1)
        found.append(block.b.or_(q, block.b.shl(top, every(_INTS, 4))))
    return found


def _q5_0(block: Block) -> None:
    block.add(block.half(0), _halves(*(block.less(q, 16) for q in _with_fifth_bits(block, 2, 6))))


def _q5_1(block: Block) -> None:
    _add_with_low(block, _with_fifth_bits(block, 4, 8))


def _iq4_nl(block: Block) -> None:
    block.add(block.half(0), _halves(*(block.lookup(q, _IQ4_VALUES) for q in block.nibbles(2))))


def _iq4_xs(block: Block) -> None:
    b = block.b
    high = b.zext(block.read(2, I16), I32)
    low_bits = block.spread(block.read(4, I32), range(0, 32, 4), 4)
    eight = b.or_(low_bits, b.shl(block.spread(high, range(0, 16, 2), 2), every(low_bits.type, 4)))
    scales = block.floats(b.sub(eight, every(eight.type, 32)))
    scales = b.fmul(scales, broadcast(b, block.half(0), scales.type))
    for i in range(8):
        ints = (block.lookup(q, _IQ4_VALUES) for q in block.nibbles(8 + 16 * i))
        block.add(block.lane(scales, i), [(q, 32 * i + j) for q, j in _halves(*ints)])


def _mxfp4(block: Block) -> None:
    b, e = block.b, block.b.zext(block.read(0, I8), I32)
    small = b.shl(ir.Constant(I32, 0x00200000), e)  # 2^(e−128) is subnormal
    usual = b.shl(b.sub(e, ir.Constant(I32, 1)), ir.Constant(I32, 23))
    d = b.bitcast(b.select(b.icmp_unsigned("<", e, ir.Constant(I32, 2)), small, usual), F32)
    block.add(d, _halves(*(block.lookup(q, _FP4_VALUES) for q in block.nibbles(1))))


def _k_scales(block: Block) -> tuple[Any, Any]:
    """The scales of Q4_K's and Q5_K's 8 groups of 32, times d; and 16 lows, two for each group."""
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
    twice = ir.Constant(_INTS, [i // 2 for i in range(GROUP)])
    return scales, b.shuffle_vector(lows, lows, twice)


def _k_floats(block: Block, factor: Any, *words: Any) -> Any:
    """The eight bytes of two words, as floats, times a factor."""
    pair = ir.Constant(ir.VectorType(I32, 2), ir.Undefined)
    for i, word in enumerate(words):
        pair = block.b.insert_element(pair, word, ir.Constant(I32, i))
    whole = block.b.zext(block.b.bitcast(pair, ir.VectorType(I8, 8)), ir.VectorType(I32, 8))
    floats = block.floats(whole)
    return block.b.fmul(floats, broadcast(block.b, factor, floats.type))


def _q4_k(block: Block) -> None:
    scales, lows = _k_scales(block)
    block.add_lows(lows)
    for i in range(0, 8, 2):  # groups that share their bytes
        q = [block.bytes(16 + 16 * i + j) for j in (0, 16)]
        for n in range(2):
            parts = [(block.bits(v, 4 * n, 4), 32 * (i + n) + 16 * j) for j, v in enumerate(q)]
            block.add(block.lane(scales, i + n), parts)


def _q5_k(block: Block) -> None:
    scales, lows = _k_scales(block)
    block.add_lows(lows)
    fifth = [block.bytes(16 + j) for j in (0, 16)]
    for i in range(0, 8, 2):
        q = [block.bytes(48 + 16 * i + j) for j in (0, 16)]
        for n in range(2):
            parts = []
            for j, v in enumerate(q):
                top = block.high_bits(fifth[j], i + n, 1, to=4)
                parts.append((block.b.or_(block.bits(v, 4 * n, 4), top), 32 * (i + n) + 16 * j))
            block.add(block.lane(scales, i + n), parts)


def _q6_k(block: Block) -> None:
    b = block.b
    d = broadcast(b, block.half(208), FLOATS)
    scales = b.fmul(block.floats(block.signed(192)), d)
    block.add_lows(b.fmul(scales, every(FLOATS, -32.0)))
    for half in range(2):
        for j in (0, 16):
            top = block.bytes(128 + 32 * half + j)
            q = [block.bytes(64 * half + 32 * i + j) for i in range(2)]
            for k in range(4):  # 32 weights apart
                high = block.high_bits(top, 2 * k, 2, to=4)
                first = 128 * half + 32 * k + j
                ints = b.or_(block.bits(q[k % 2], k // 2 * 4, 4), high)
                block.add(block.lane(scales, first // 16), [(ints, first)])


def _f16(block: Block) -> None:
    for i in range(0, LEAST, GROUP):
        halves = block.read(2 * i, ir.VectorType(ir.HalfType(), GROUP))
        block.add_floats(block.b.fpext(halves, FLOATS), i)


def _bf16(block: Block) -> None:
    for i in range(0, LEAST, GROUP):
        upper = block.b.zext(block.read(2 * i, ir.VectorType(I16, GROUP)), _INTS)
        bits = block.b.shl(upper, every(_INTS, 16))
        block.add_floats(block.b.bitcast(bits, FLOATS), i)


def _f32(block: Block) -> None:
    for i in range(0, LEAST, GROUP):
        block.add_floats(block.read(4 * i, FLOATS), i)


Emit = Callable[[Block], None]
EMIT: dict[str, Emit] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
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
