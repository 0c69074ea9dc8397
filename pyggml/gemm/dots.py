"""Dot products of packed rows with float32, never unpacked: what one token at a time spends.

A block's weights are scale·q + low for groups of 16 or more, so its part of a dot product is
scale·Σ q x + low·Σ x. Whole numbers q go straight to vectors of float32, scales multiply sums, and
Σ x is the same for every row. Types of the table `_EMIT` have this path; others are unpacked first.

The code of a type takes a row's block through `_Block`, 16 numbers at a time. How the bytes of each
type lie is said in pyggml.quants. Exact like unpacking, but for the order of the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from itertools import cycle
from typing import Any

import numpy as np
from llvmlite import ir

from pyggml._jit import cgutils, intrinsic, kernel, types
from pyggml.dtypes import DType, dtype
from pyggml.gemm.vectors import F32, I8, I16, I32, I64, broadcast, every, fma, total

GROUP = 16  # numbers of one vector, and of one Σ x
LONGEST = 1 << 16  # numbers of a row whose group sums fit into a thread's scratch
LEAST = 32  # numbers in a step of a type whose own blocks are shorter
ROWS = 4  # rows that are multiplied beside each other: they share what is loaded of x
_CHAINS = 4  # independent sums of a row, so that none waits for the one before
_FLOATS, _INTS = ir.VectorType(F32, GROUP), ir.VectorType(I32, GROUP)


class _Block:
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

    def less(self, ints: Any, n: int) -> Any:
        return self.b.sub(ints, every(_INTS, n))

    def floats(self, ints: Any) -> Any:
        return self.b.sitofp(ints, ir.VectorType(F32, ints.type.count))

    # -- sums ----------------------------------------------------------------------------------

    def add(self, scale: Any, parts: Iterable[tuple[Any, int]]) -> None:
        """scale · Σ q x over pairs of 16 integers q and the index of x that the first meets."""
        part = every(_FLOATS, 0.0)
        for ints, i in parts:
            part = fma(self.b, self.floats(ints), self._floats_at(self._x, i), part)
        self._sum(part, broadcast(self.b, scale, _FLOATS))

    def add_floats(self, floats: Any, i: int) -> None:
        """Σ w x of 16 weights that are floats."""
        self._sum(floats, self._floats_at(self._x, i))

    def add_lows(self, lows: Any) -> None:
        """Σ low · Σ x over 16 groups, the first of them at the block's beginning."""
        self._sum(lows, self._floats_at(self._group_sums, 0))

    def _floats_at(self, base: Any, i: int) -> Any:
        place = self.b.inttoptr(self.b.add(base, ir.Constant(I64, 4 * i)), _FLOATS.as_pointer())
        value = self.b.load(place)
        value.align = 4
        return value

    def _sum(self, a: Any, b: Any) -> None:
        sums = next(self._chains)
        self.b.store(fma(self.b, a, b, self.b.load(sums)), sums)

    def lane(self, vector: Any, i: int) -> Any:
        return self.b.extract_element(vector, ir.Constant(I32, i))


# -- the types ------------------------------------------------------------------------------------


def _q8_0(block: _Block) -> None:
    block.add(block.half(0), [(block.signed(2 + i), i) for i in (0, 16)])


def _q4_0(block: _Block) -> None:
    q = block.bytes(2)
    low, high = block.bits(q, 0, 4), block.bits(q, 4, 4)
    block.add(block.half(0), [(block.less(low, 8), 0), (block.less(high, 8), 16)])


def _k_scales(block: _Block) -> tuple[Any, Any]:
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


def _k_floats(block: _Block, factor: Any, *words: Any) -> Any:
    """The eight bytes of two words, as floats, times a factor."""
    pair = ir.Constant(ir.VectorType(I32, 2), ir.Undefined)
    for i, word in enumerate(words):
        pair = block.b.insert_element(pair, word, ir.Constant(I32, i))
    whole = block.b.zext(block.b.bitcast(pair, ir.VectorType(I8, 8)), ir.VectorType(I32, 8))
    floats = block.floats(whole)
    return block.b.fmul(floats, broadcast(block.b, factor, floats.type))


def _q4_k(block: _Block) -> None:
    scales, lows = _k_scales(block)
    block.add_lows(lows)
    for i in range(0, 8, 2):  # groups that share their bytes
        q = [block.bytes(16 + 16 * i + j) for j in (0, 16)]
        for n in range(2):
            parts = [(block.bits(v, 4 * n, 4), 32 * (i + n) + 16 * j) for j, v in enumerate(q)]
            block.add(block.lane(scales, i + n), parts)


def _q5_k(block: _Block) -> None:
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


def _q6_k(block: _Block) -> None:
    b = block.b
    d = broadcast(b, block.half(208), _FLOATS)
    scales = b.fmul(block.floats(block.signed(192)), d)
    block.add_lows(b.fmul(scales, every(_FLOATS, -32.0)))
    for half in range(2):
        for j in (0, 16):
            top = block.bytes(128 + 32 * half + j)
            q = [block.bytes(64 * half + 32 * i + j) for i in range(2)]
            for k in range(4):  # 32 weights apart
                high = block.high_bits(top, 2 * k, 2, to=4)
                first = 128 * half + 32 * k + j
                ints = b.or_(block.bits(q[k % 2], k // 2 * 4, 4), high)
                block.add(block.lane(scales, first // 16), [(ints, first)])


def _f16(block: _Block) -> None:
    for i in range(0, LEAST, GROUP):
        halves = block.read(2 * i, ir.VectorType(ir.HalfType(), GROUP))
        block.add_floats(block.b.fpext(halves, _FLOATS), i)


def _bf16(block: _Block) -> None:
    for i in range(0, LEAST, GROUP):
        upper = block.b.zext(block.read(2 * i, ir.VectorType(I16, GROUP)), _INTS)
        bits = block.b.shl(upper, every(_INTS, 16))
        block.add_floats(block.b.bitcast(bits, _FLOATS), i)


def _f32(block: _Block) -> None:
    for i in range(0, LEAST, GROUP):
        block.add_floats(block.read(4 * i, _FLOATS), i)


# -- one function for all of them -----------------------------------------------------------------

_Emit = Callable[[_Block], None]
_EMIT: dict[str, _Emit] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def step(kind: DType) -> int:
    """Weights that one round of the loop over a row takes: a row has a whole number of them."""
    return max(kind.block, LEAST)


def code(kind: DType, depth: int) -> int:
    """The number by which row_dot knows a type; -1 if it cannot take such rows."""
    known = kind.name in _EMIT and depth % step(kind) == 0 and depth <= LONGEST
    return list(_EMIT).index(kind.name) if known else -1


@kernel
def group_sums(sums, x):
    """Sums of GROUP neighbours of x."""
    for i in range(x.size // GROUP):
        total = np.float32(0)
        for j in range(GROUP):
            total += x[i * GROUP + j]
        sums[i] = total


@intrinsic
def row_dot(typing: Any, code: Any, row: Any, x: Any, sums: Any, depth: Any) -> Any:
    """Σ w x of a packed row; addresses of the row, of x, and of the sums of its groups."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        which, *sides = arguments
        found = cgutils.alloca_once_value(builder, ir.Constant(F32, 0.0))
        for i, (name, emit) in enumerate(_EMIT.items()):
            with builder.if_then(builder.icmp_signed("==", which, ir.Constant(I64, i))):
                builder.store(_emit_row(builder, sides, dtype(name), emit), found)
        return builder.load(found)

    return types.float32(*(types.intp,) * 5), codegen


def _emit_row(builder: Any, sides: list[Any], kind: DType, emit: _Emit) -> Any:
    """The loop over a row's blocks, and their sum."""
    *bases, depth = sides
    n = step(kind)
    sizes = n // kind.block * kind.block_bytes, 4 * n, 4 * n // GROUP
    chains = [cgutils.alloca_once(builder, _FLOATS) for _ in range(_CHAINS)]
    for chain in chains:
        builder.store(every(_FLOATS, 0.0), chain)
    with cgutils.for_range(builder, builder.udiv(depth, ir.Constant(I64, n))) as loop:
        here = (
            builder.add(base, builder.mul(loop.index, ir.Constant(I64, size)))
            for base, size in zip(bases, sizes, strict=True)
        )
        emit(_Block(builder, chains, *here))
    return total(builder, reduce(builder.fadd, [builder.load(chain) for chain in chains]))
