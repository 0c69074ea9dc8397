"""Rows of x as signed bytes for products in integers: 32 numbers x ≈ scale · q, with |q| <= 127.

`quantize` writes for each block of WIDE numbers, into arrays of 32-bit slots one after the other:

bytes    q, four to a slot
quads    −128 · Σ q of each slot's four: weights are multiplied as q + 128, unsigned, which the CPU
         wants of one side, and sums that begin here come out right
scales   max |x| / 127, float32
totals   scale · Σ q, which a weight's low is multiplied with

What is not finite makes its block's scale so, and with it all that the scale meets.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from pyggml._jit import cgutils, intrinsic, types
from pyggml.gemm.blocks import FLOATS, WIDE
from pyggml.gemm.isa import CHOSEN
from pyggml.gemm.vectors import (
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

QUADS = WIDE // 4  # slots of a block's bytes, and of its quads
LIMIT = 127.0
_TINY = 1e-30  # below it 127 / max |x| could overflow; such a block is nothing beside others
_BITS = ir.VectorType(I32, FLOATS.count)
_HALF = ir.VectorType(I8, FLOATS.count)


@intrinsic
def quantize(typing: Any, bytes_: Any, quads: Any, scales: Any, totals: Any, x: Any, n: Any) -> Any:
    """n blocks of x to bytes, quads, scales and totals; addresses."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *places, n = arguments
        with cgutils.for_range_slice(builder, n.type(0), n, n.type(1)) as (i, _):
            _emit_block(builder, i, *places)
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 6), codegen


def _emit_block(b: Any, i: Any, bytes_: Any, quads: Any, scales: Any, totals: Any, x: Any) -> None:
    eight = b.mul(i, ir.Constant(I64, QUADS))
    first = b.mul(i, ir.Constant(I64, WIDE))
    values = [load(b, at(b, x, first, n), FLOATS) for n in (0, FLOATS.count)]
    most = _largest(b, values)
    scale = b.fdiv(most, ir.Constant(F32, LIMIT))
    usual = b.fcmp_ordered(">", most, ir.Constant(F32, _TINY))
    per_scale = b.select(usual, b.fdiv(ir.Constant(F32, LIMIT), most), ir.Constant(F32, 0.0))
    halves = [_rounded(b, v, per_scale) for v in values]
    q = b.shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, WIDE), [*range(WIDE)]))
    ints = ir.VectorType(I32, QUADS)
    sums = by_quads(b, every(q.type, 1), q, every(ints, 0), CHOSEN.vnni)
    name = f"llvm.vector.reduce.add.v{QUADS}i32"
    total = b.sitofp(b.call(declared(b, name, I32, [ints]), [sums]), F32)
    store(b, b.bitcast(q, ints), at(b, bytes_, eight))
    store(b, b.mul(sums, every(ints, -128)), at(b, quads, eight))
    b.store(scale, at(b, scales, i))
    b.store(b.fmul(scale, total), at(b, totals, i))


def _largest(b: Any, values: list[Any]) -> Any:
    """max |x|, sought among bit patterns, where NaN is above all numbers."""
    bits = [b.and_(b.bitcast(v, _BITS), every(_BITS, 0x7FFFFFFF)) for v in values]
    pair = b.select(b.icmp_unsigned(">", *bits), *bits)
    name = f"llvm.vector.reduce.umax.v{_BITS.count}i32"
    return b.bitcast(b.call(declared(b, name, I32, [_BITS]), [pair]), F32)


def _rounded(b: Any, x: Any, per_scale: Any) -> Any:
    """x · per_scale to the nearest whole number, ties to even, as bytes."""
    scaled = b.fmul(x, broadcast(b, per_scale, FLOATS))
    rint = declared(b, f"llvm.rint.v{FLOATS.count}f32", FLOATS, [FLOATS])
    return b.trunc(b.fptosi(b.call(rint, [scaled]), _BITS), _HALF)
