"""Rows of x as signed bytes for products in integers: 32 numbers x ≈ scale · q, with |q| <= 127.

A block is GROUP numbers of x. `quantize` writes its bytes and three terms, words of 32 bits:

scale    max |x| / 127
start    −128 · Σ q, an integer: the first term of a sum of products. x86 wants one factor unsigned,
         so weights are multiplied as q + 128; this subtracts 128 · Σ q. NEON multiplies signed
         weights, and sums begin with 0
total    scale · Σ q: the factor of the minimum of a block of weights

A number that is not finite makes its block's scale infinite or NaN, and so the block's products.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

from llvmlite import ir

from pyggml.jit import cgutils, instruction, types
from pyggml.jit.llvm import (
    F32,
    I8,
    I32,
    I64,
    at,
    broadcast,
    by_quads,
    concatenate,
    declare_intrinsic,
    every,
    load,
    prefetch,
    shuffle,
    store,
)
from pyggml.quants.layout import GROUP
from pyggml.quants.readers.vectors import F32X16

BLOCK_WORDS = GROUP // 4  # of the bytes of a block
LIMIT = 127.0
_TINY = 1e-30  # 127 / max |x| could overflow below it: such a block becomes zeros
_MANY = 16  # blocks that `quantize` rounds together: their scales are one vector
_BITS = ir.VectorType(I32, F32X16.count)
_BYTES = ir.VectorType(I8, F32X16.count)


@instruction(types.void(*(types.intp,) * 6))
def quantize(b: Any, bytes_: Any, terms: Any, step: Any, x: Any, n: Any, ahead: Any) -> None:
    """n blocks of x to bytes, and to the terms of each block: scale, start and total, `step` words
    apart; addresses. Meanwhile as much from `ahead` on is prefetched.

    Blocks one by one take 1.8 times as long: the largest of 32, two quotients, a sum each.
    """
    many = b.and_(n, ir.Constant(n.type, -_MANY))
    with cgutils.for_range_slice(b, n.type(0), many, n.type(_MANY)) as (i, _):
        scales, totals = _emit_blocks(b, i, bytes_, x, ahead)
        _store_terms(b, terms, step, i, scales, totals)
    with cgutils.for_range_slice(b, many, n, n.type(1)) as (i, _):
        one = [broadcast(b, v, ir.VectorType(v.type, 1)) for v in _emit_block(b, i, bytes_, x)]
        _store_terms(b, terms, step, i, *one)


def _store_terms(b: Any, terms: Any, step: Any, first: Any, scales: Any, totals: Any) -> None:
    """The terms of blocks from `first` on, from vectors of their scales and Σ q."""
    kind = scales.type
    starts = b.bitcast(b.mul(totals, every(totals.type, -128)), kind)
    scaled = b.fmul(scales, b.sitofp(totals, kind))
    for block in range(kind.count):
        here = b.mul(b.mul(b.add(first, ir.Constant(I64, block)), ir.Constant(I64, 3)), step)
        for values in (scales, starts, scaled):
            b.store(b.extract_element(values, ir.Constant(I32, block)), at(b, terms, here))
            here = b.add(here, step)


def _emit_blocks(b: Any, i: Any, bytes_: Any, x: Any, ahead: Any) -> tuple[Any, Any]:
    """_MANY blocks from i on to bytes. Returns vectors of their scales and of their Σ q."""
    blocks = [b.add(i, ir.Constant(I64, n)) for n in range(_MANY)]

    def sizes(n: int) -> Any:
        return b.bitcast(largest(b, _numbers(b, blocks[n], x)), _BITS)

    def larger(u: Any, v: Any) -> Any:
        return b.select(b.icmp_unsigned(">", u, v), u, v)

    scales, per_scales = scale_of(b, b.bitcast(_join_lanes(b, sizes, _MANY, larger), F32X16))

    def round_one(n: int) -> Any:
        for half in (0, F32X16.count):
            prefetch(b, at(b, ahead, b.mul(blocks[n], ir.Constant(I64, GROUP)), half))
        per_scale = shuffle(b, [n] * F32X16.count, per_scales)
        return _round_block(b, blocks[n], bytes_, _numbers(b, blocks[n], x), per_scale)

    def sums(n: int) -> Any:
        two = concatenate(b, [round_one(2 * n), round_one(2 * n + 1)])
        return by_quads(b, every(two.type, 1), two, every(_BITS, 0))

    return scales, _join_lanes(b, sums, _MANY // 2, b.add)


def _join_lanes(b: Any, vector: Callable[[int], Any], n: int, join: Any, first: int = 0) -> Any:
    """vector(first) and those after it, n in all, as one: of each as many lanes as fit, and in each
    of these what `join` makes of its neighbours."""
    if n == 1:
        return vector(first)
    two = [_join_lanes(b, vector, n // 2, join, start) for start in (first, first + n // 2)]
    lanes = 2 * two[0].type.count
    return join(*(shuffle(b, range(odd, lanes, 2), *two) for odd in (0, 1)))


def _numbers(b: Any, i: Any, x: Any) -> list[Any]:
    """The numbers of block i."""
    first = b.mul(i, ir.Constant(I64, GROUP))
    return [load(b, at(b, x, first, half), F32X16) for half in (0, F32X16.count)]


def _round_block(b: Any, i: Any, bytes_: Any, values: list[Any], per_scale: Any) -> Any:
    """Block i's numbers to bytes, which it also returns; per_scale: 1 / scale in every lane."""
    parts = [b.trunc(round_product(b, v, per_scale), _BYTES) for v in values]
    q = concatenate(b, parts)
    words = b.bitcast(q, ir.VectorType(I32, BLOCK_WORDS))
    store(b, words, at(b, bytes_, b.mul(i, ir.Constant(I64, BLOCK_WORDS))))
    return q


def _emit_block(b: Any, i: Any, bytes_: Any, x: Any) -> tuple[Any, Any]:
    """Block i of x to bytes. Returns its scale and Σ q."""
    values = _numbers(b, i, x)
    name = f"llvm.vector.reduce.umax.v{_BITS.count}i32"
    bits = b.bitcast(largest(b, values), _BITS)
    most = b.bitcast(b.call(declare_intrinsic(b, name, I32, [_BITS]), [bits]), F32)
    scale, per_scale = scale_of(b, most)
    q = _round_block(b, i, bytes_, values, broadcast(b, per_scale, F32X16))
    ints = ir.VectorType(I32, BLOCK_WORDS)
    sums = by_quads(b, every(q.type, 1), q, every(ints, 0))
    name = f"llvm.vector.reduce.add.v{BLOCK_WORDS}i32"
    return scale, b.call(declare_intrinsic(b, name, I32, [ints]), [sums])


def largest(b: Any, values: list[Any]) -> Any:
    """max |x| of each lane. Bit patterns are compared: among them NaN is above all numbers."""
    kind = ir.VectorType(I32, values[0].type.count)
    bits = [b.and_(b.bitcast(v, kind), every(kind, 0x7FFFFFFF)) for v in values]
    most = reduce(lambda x, y: b.select(b.icmp_unsigned(">", x, y), x, y), bits)
    return b.bitcast(most, values[0].type)


def scale_of(b: Any, most: Any, to: float = LIMIT) -> tuple[Any, Any]:
    """The scale that maps numbers up to `most` to whole ones up to `to`, and its inverse."""
    constant = ir.Constant if most.type == F32 else every
    limit, tiny, zero = (constant(most.type, n) for n in (to, _TINY, 0.0))
    usual = b.fcmp_ordered(">", most, tiny)
    return b.fdiv(most, limit), b.select(usual, b.fdiv(limit, most), zero)


def round_product(b: Any, x: Any, per_scale: Any) -> Any:
    """x · per_scale to the nearest whole numbers, ties to even."""
    rint = declare_intrinsic(b, f"llvm.rint.v{x.type.count}f32", x.type, [x.type])
    whole = b.call(rint, [b.fmul(x, per_scale)])
    return b.fptosi(whole, ir.VectorType(I32, x.type.count))
