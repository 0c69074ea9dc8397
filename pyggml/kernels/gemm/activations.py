"""Rows of x as signed bytes for products in integers: 32 numbers x ≈ scale · q, with |q| <= 127.

A block is GROUP numbers of x. `quantize` writes four arrays of 32-bit words:

bytes    q, four to a word
starts   −128 · Σ q of each word, an integer: the first term of each sum of products. x86
         wants one factor unsigned, so weights are multiplied as q + 128; this subtracts 128 · Σ q.
         NEON multiplies signed weights, and sums begin with 0
scales   max |x| / 127 of each block
totals   scale · Σ q of each block: the factor of the minimum of a block of weights

`quantize_for_tile` writes the same bytes, and one start for each block.

A number that is not finite makes its block's scale infinite or NaN, and so the block's products.
"""

from functools import reduce
from typing import Any

from llvmlite import ir

from pyggml.jit import cgutils, intrinsic, types
from pyggml.jit.llvm import (
    F32,
    I8,
    I32,
    I64,
    at,
    broadcast,
    by_quads,
    declare_intrinsic,
    every,
    load,
    store,
)
from pyggml.quants.layout import GROUP
from pyggml.quants.readers.vectors import F32X16

BLOCK_WORDS = GROUP // 4  # of the bytes of a block
LIMIT = 127.0
_TINY = 1e-30  # 127 / max |x| could overflow below it: such a block becomes zeros
_BITS = ir.VectorType(I32, F32X16.count)
_BYTES = ir.VectorType(I8, F32X16.count)


@intrinsic
def quantize(
    typing: Any, bytes_: Any, starts: Any, scales: Any, totals: Any, x: Any, n: Any
) -> Any:
    """n blocks of x to bytes, starts, scales and totals; addresses."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bytes_, starts, scales, totals, x, n = arguments
        with cgutils.for_range_slice(builder, n.type(0), n, n.type(1)) as (i, _):
            scale, sums, total = _emit_block(builder, i, bytes_, x)
            word = builder.mul(i, ir.Constant(I64, BLOCK_WORDS))
            store(builder, builder.mul(sums, every(sums.type, -128)), at(builder, starts, word))
            builder.store(scale, at(builder, scales, i))
            builder.store(builder.fmul(scale, builder.sitofp(total, F32)), at(builder, totals, i))
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 6), codegen


@intrinsic
def quantize_for_tile(typing: Any, bytes_: Any, terms: Any, step: Any, x: Any, n: Any) -> Any:
    """n blocks of x to bytes, and to the terms of each block: scale, start and total, `step` words
    apart; addresses."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bytes_, terms, step, x, n = arguments
        with cgutils.for_range_slice(builder, n.type(0), n, n.type(1)) as (i, _):
            scale, _, total = _emit_block(builder, i, bytes_, x)
            start = builder.bitcast(builder.mul(total, ir.Constant(I32, -128)), F32)
            scaled = builder.fmul(scale, builder.sitofp(total, F32))
            here = builder.mul(builder.mul(i, ir.Constant(I64, 3)), step)
            for value in (scale, start, scaled):
                builder.store(value, at(builder, terms, here))
                here = builder.add(here, step)
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 5), codegen


def _emit_block(b: Any, i: Any, bytes_: Any, x: Any) -> tuple[Any, Any, Any]:
    """Block i of x to bytes. Returns its scale, Σ q of each word, and Σ q of the block."""
    first = b.mul(i, ir.Constant(I64, GROUP))
    values = [load(b, at(b, x, first, n), F32X16) for n in (0, F32X16.count)]
    name = f"llvm.vector.reduce.umax.v{_BITS.count}i32"
    bits = b.bitcast(largest(b, values), _BITS)
    most = b.bitcast(b.call(declare_intrinsic(b, name, I32, [_BITS]), [bits]), F32)
    scale, per_scale = scale_of(b, most)
    per_scale = broadcast(b, per_scale, F32X16)
    parts = [b.trunc(round_product(b, v, per_scale), _BYTES) for v in values]
    q = b.shuffle_vector(*parts, ir.Constant(ir.VectorType(I32, GROUP), [*range(GROUP)]))
    ints = ir.VectorType(I32, BLOCK_WORDS)
    store(b, b.bitcast(q, ints), at(b, bytes_, b.mul(i, ir.Constant(I64, BLOCK_WORDS))))
    sums = by_quads(b, every(q.type, 1), q, every(ints, 0))
    name = f"llvm.vector.reduce.add.v{BLOCK_WORDS}i32"
    return scale, sums, b.call(declare_intrinsic(b, name, I32, [ints]), [sums])


def largest(b: Any, values: list[Any]) -> Any:
    """max |x| of each lane. Bit patterns are compared: among them NaN is above all numbers."""
    kind = ir.VectorType(I32, values[0].type.count)
    bits = [b.and_(b.bitcast(v, kind), every(kind, 0x7FFFFFFF)) for v in values]
    most = reduce(lambda x, y: b.select(b.icmp_unsigned(">", x, y), x, y), bits)
    return b.bitcast(most, values[0].type)


def scale_of(b: Any, most: Any) -> tuple[Any, Any]:
    """The scale that maps numbers up to `most` to bytes up to LIMIT, and its inverse."""
    constant = ir.Constant if most.type == F32 else every
    limit, tiny, zero = (constant(most.type, n) for n in (LIMIT, _TINY, 0.0))
    usual = b.fcmp_ordered(">", most, tiny)
    return b.fdiv(most, limit), b.select(usual, b.fdiv(limit, most), zero)


def round_product(b: Any, x: Any, per_scale: Any) -> Any:
    """x · per_scale to the nearest whole numbers, ties to even."""
    rint = declare_intrinsic(b, f"llvm.rint.v{x.type.count}f32", x.type, [x.type])
    whole = b.call(rint, [b.fmul(x, per_scale)])
    return b.fptosi(whole, ir.VectorType(I32, x.type.count))
