"""Rows of x as signed bytes for products in integers: 32 numbers x ≈ scale · q, with |q| <= 127.

`quantize` writes for each GROUP of numbers, into arrays of 32-bit slots one after the other:

bytes    q, four to a slot
quads    −128 · Σ q of each slot's four: weights are multiplied as q + 128, unsigned, which the CPU
         wants of one side, and sums that begin here come out right
scales   max |x| / 127, float32
totals   scale · Σ q, which a weight's minimum is multiplied with

`quantize_for_tile` writes the bytes likewise, and of the quads only their sum.

What is not finite makes its block's scale so, and with it all that the scale meets.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from llvmlite import ir

from pyggml._isa import CHOSEN
from pyggml._jit import cgutils, intrinsic, types
from pyggml._llvm import (
    F32,
    I8,
    I32,
    I64,
    at,
    broadcast,
    by_quads,
    declared,
    every,
    load,
    store,
)
from pyggml.quants.layout import GROUP
from pyggml.quants.vectors import F32X16

QUADS = GROUP // 4  # slots of a block's bytes, and of its quads
LIMIT = 127.0
_TINY = 1e-30  # below it 127 / max |x| could overflow; such a block is nothing beside others
_BITS = ir.VectorType(I32, F32X16.count)
_HALF = ir.VectorType(I8, F32X16.count)


@intrinsic
def quantize(typing: Any, bytes_: Any, quads: Any, scales: Any, totals: Any, x: Any, n: Any) -> Any:
    """n blocks of x to bytes, quads, scales and totals; addresses."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bytes_, quads, scales, totals, x, n = arguments
        with cgutils.for_range_slice(builder, n.type(0), n, n.type(1)) as (i, _):
            scale, sums, total = _emit_block(builder, i, bytes_, x)
            eight = builder.mul(i, ir.Constant(I64, QUADS))
            store(builder, builder.mul(sums, every(sums.type, -128)), at(builder, quads, eight))
            builder.store(scale, at(builder, scales, i))
            builder.store(builder.fmul(scale, builder.sitofp(total, F32)), at(builder, totals, i))
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 6), codegen


@intrinsic
def quantize_for_tile(typing: Any, bytes_: Any, sides: Any, gap: Any, x: Any, n: Any) -> Any:
    """n blocks of x to bytes and to sides: each block's scale, the sum of its quads and its total,
    `gap` slots apart; addresses."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bytes_, sides, gap, x, n = arguments
        with cgutils.for_range_slice(builder, n.type(0), n, n.type(1)) as (i, _):
            scale, _, total = _emit_block(builder, i, bytes_, x)
            start = builder.bitcast(builder.mul(total, ir.Constant(I32, -128)), F32)
            scaled = builder.fmul(scale, builder.sitofp(total, F32))
            here = builder.mul(builder.mul(i, ir.Constant(I64, 3)), gap)
            for value in (scale, start, scaled):
                builder.store(value, at(builder, sides, here))
                here = builder.add(here, gap)
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 5), codegen


def _emit_block(b: Any, i: Any, bytes_: Any, x: Any) -> tuple[Any, Any, Any]:
    """Block i of x to bytes; its scale, the sums Σ q of each slot's four, and Σ q of all."""
    first = b.mul(i, ir.Constant(I64, GROUP))
    values = [load(b, at(b, x, first, n), F32X16) for n in (0, F32X16.count)]
    name = f"llvm.vector.reduce.umax.v{_BITS.count}i32"
    bits = b.bitcast(largest(b, values), _BITS)
    most = b.bitcast(b.call(declared(b, name, I32, [_BITS]), [bits]), F32)
    scale, per_scale = scale_of(b, most)
    per_scale = broadcast(b, per_scale, F32X16)
    halves = [b.trunc(rounded(b, v, per_scale), _HALF) for v in values]
    q = b.shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, GROUP), [*range(GROUP)]))
    ints = ir.VectorType(I32, QUADS)
    store(b, b.bitcast(q, ints), at(b, bytes_, b.mul(i, ir.Constant(I64, QUADS))))
    sums = by_quads(b, every(q.type, 1), q, every(ints, 0), CHOSEN.vnni)
    name = f"llvm.vector.reduce.add.v{QUADS}i32"
    return scale, sums, b.call(declared(b, name, I32, [ints]), [sums])


def largest(b: Any, values: list[Any]) -> Any:
    """max |x| of each lane, sought among bit patterns, where NaN is above all numbers."""
    kind = ir.VectorType(I32, values[0].type.count)
    bits = [b.and_(b.bitcast(v, kind), every(kind, 0x7FFFFFFF)) for v in values]
    most = reduce(lambda x, y: b.select(b.icmp_unsigned(">", x, y), x, y), bits)
    return b.bitcast(most, values[0].type)


def scale_of(b: Any, most: Any) -> tuple[Any, Any]:
    """The scale of bytes up to LIMIT for numbers up to `most`, and what x is multiplied with."""
    constant = ir.Constant if most.type == F32 else every
    limit, tiny, zero = (constant(most.type, n) for n in (LIMIT, _TINY, 0.0))
    usual = b.fcmp_ordered(">", most, tiny)
    return b.fdiv(most, limit), b.select(usual, b.fdiv(limit, most), zero)


def rounded(b: Any, x: Any, per_scale: Any) -> Any:
    """x · per_scale to the nearest whole numbers, ties to even."""
    rint = declared(b, f"llvm.rint.v{x.type.count}f32", x.type, [x.type])
    whole = b.call(rint, [b.fmul(x, per_scale)])
    return b.fptosi(whole, ir.VectorType(I32, x.type.count))
