"""LLVM code of the products in integers: weights unpacked to bytes, and the register tile.

unpack_bytes      blocks of a type of KINDS -> a row's bytes, then its scales, then its minima
quantize_columns  floats of W's rows -> bytes and scales of its columns
byte_product      C[MR, BYTE_PANEL] (+)= Σ over 32 numbers at a time of both scales · Σ of integers

A weight is multiplied as q + 128, unsigned; x is signed (see pyggml.gemm.activations). The sum of
32 products of bytes is exact in int32, and becomes a float32 when both scales multiply it.
"""

from __future__ import annotations

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
    fma,
    load,
    prefetch,
    store,
)
from pyggml.dtypes import dtype
from pyggml.gemm.activations import QUADS, largest, rounded, scale_of
from pyggml.gemm.dots import step
from pyggml.gemm.panels import LANES, MR, PADDED_MR
from pyggml.quants.layout import GROUP, SUBGROUP
from pyggml.quants.unpack import INTEGER_TYPES, LAYOUTS
from pyggml.quants.vectors import F32X16, VectorBlock, emit_blocks

KINDS = list(INTEGER_TYPES)
_QUARTER = ir.Constant(F32, 0.25)

# Registers hold the sums of a block, integers, beside those of all blocks: half as many columns.
BYTE_NV = CHOSEN.nv // 2
BYTE_PANEL = BYTE_NV * LANES
_COLUMNS = range(0, BYTE_PANEL, LANES)

DEPTH = 1024  # numbers along K in one pass: C is read and written once for all of them
BLOCKS = DEPTH // GROUP
SLOTS = BLOCKS * QUADS  # of their bytes
CHUNK = 512  # rows of W in one backward pass
ROW = SLOTS + 2 * BLOCKS  # an unpacked row: bytes, scales, minima
ROWS = max(LANES * ROW, PADDED_MR * SLOTS)  # scratch to unpack W, to pack x

_NUMBERS, _INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


class _Bytes(VectorBlock):
    """Writes what it is told: GROUP bytes q + 128 for each scale, and minima."""

    def __init__(self, builder: Any, source: Any, q: Any, scales: Any, minima: Any) -> None:
        super().__init__(builder, source)
        self._q, self._scales, self._minima = q, scales, minima

    def add(self, scale: Any, q: Any, i: int = 0) -> None:
        unsigned = self.b.bitcast(self.b.xor(q, every(q.type, -128)), ir.VectorType(I32, QUADS))
        store(self.b, unsigned, at(self.b, self._q, ir.Constant(I64, i // 4)))
        self.b.store(scale, at(self.b, self._scales, ir.Constant(I64, i // GROUP)))

    def add_two(self, scales: tuple[Any, Any], q: Any, i: int) -> None:
        """Both groups in quarters of the larger scale, which the other's weights are rounded to:
        that has a 16th of the variance of what the larger scale itself was rounded by."""
        b, zero = self.b, ir.Constant(F32, 0.0)
        sizes = [b.call(declared(b, "llvm.fabs.f32", F32, [F32]), [s]) for s in scales]
        quarter = b.fmul(b.select(b.fcmp_unordered("uge", *sizes), *scales), _QUARTER)
        not_zero = b.fcmp_unordered("une", quarter, zero)
        per_quarter = b.select(not_zero, b.fdiv(ir.Constant(F32, 1.0), quarter), zero)
        factors = (b.fmul(scale, per_quarter) for scale in scales)
        most = every(ir.VectorType(I32, SUBGROUP), 127)
        parts = []
        for floats, factor in zip(self.subgroups(q), factors, strict=True):
            whole = rounded(b, floats, broadcast(b, factor, F32X16))
            inside = b.select(b.icmp_signed("<", whole, most), whole, most)
            parts.append(b.trunc(inside, ir.VectorType(I8, SUBGROUP)))
        order = ir.Constant(ir.VectorType(I32, GROUP), [*range(GROUP)])
        self.add(quarter, b.shuffle_vector(*parts, order), i)

    def add_minimum(self, minimum: Any) -> None:
        self.b.store(minimum, at(self.b, self._minima, ir.Constant(I64, 0)))

    def add_minima(self, minima: Any) -> None:
        store(self.b, minima, at(self.b, self._minima, ir.Constant(I64, 0)))


@intrinsic(prefer_literal=True)
def unpack_bytes(typing: Any, kind: Any, to: Any, source: Any, n: Any) -> Any:
    """n blocks of type KINDS[kind], a constant, to a row of ROW slots; pointers."""
    name = KINDS[kind.literal_value]

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, to, source, n = arguments
        source, q = builder.ptrtoint(source, I64), builder.ptrtoint(to, I64)
        scales, minima = (
            builder.add(q, ir.Constant(I64, 4 * slot)) for slot in (SLOTS, SLOTS + BLOCKS)
        )
        many = step(dtype(name))
        sizes = dtype(name).block_bytes, many, many // QUADS, many // QUADS
        places = source, q, scales, minima
        emit_blocks(builder, LAYOUTS[name], n, places, sizes, _Bytes)
        return context.get_dummy_value()

    return types.void(kind, to, source, types.intp), codegen


@intrinsic
def quantize_columns(typing: Any, to: Any, scales: Any, rows: Any, row_step: Any) -> Any:
    """LANES columns of GROUP rows of floats: QUADS vectors of bytes q + 128, BYTE_PANEL slots
    apart, and the columns' scales; addresses, row_step in floats."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, scales, rows, row_step = arguments
        starts = [builder.mul(row_step, ir.Constant(I64, i)) for i in range(GROUP)]
        values = [load(builder, at(builder, rows, start), _NUMBERS) for start in starts]
        scale, per_scale = scale_of(builder, largest(builder, values))
        store(builder, scale, at(builder, scales, ir.Constant(I64, 0)))
        for slot in range(QUADS):
            slots = every(_INTS, 0)
            for n, v in enumerate(values[4 * slot : 4 * slot + 4]):
                q = builder.add(rounded(builder, v, per_scale), every(_INTS, 128))
                byte = builder.and_(q, every(_INTS, 255))
                slots = builder.or_(slots, builder.shl(byte, every(_INTS, 8 * n)))
            store(builder, slots, at(builder, to, ir.Constant(I64, slot * BYTE_PANEL)))
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 4), codegen


@intrinsic
def byte_product(
    typing: Any, a: Any, a_sides: Any, b: Any, b_sides: Any, c: Any, ldc: Any, n: Any, minima: Any,
    accumulate: Any,
) -> Any:  # fmt: skip
    """C[MR, BYTE_PANEL] (+)= Σ over n blocks of a_scale · b_scale · (start + Σ over QUADS slots of
    a·b), and where `minima` is not 0, of total · minimum.

    a (n·QUADS, MR) slots of signed bytes, b (n·QUADS, BYTE_PANEL) slots of unsigned ones; a_sides
    (n, 3, MR) scales, starts (int32) and totals; b_sides (2, BLOCKS, BYTE_PANEL) scales and minima;
    rows of C ldc floats apart; addresses. C is overwritten unless accumulate is not 0.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, a_sides, b, b_sides, c, ldc, n, minima, accumulate = arguments
        cells = [cgutils.alloca_once(builder, _NUMBERS) for _ in range(MR * BYTE_NV)]
        for cell in cells:  # LLVM keeps them in registers
            builder.store(every(_NUMBERS, 0.0), cell)
        starts = [builder.mul(ldc, ir.Constant(I64, m)) for m in range(MR)]
        to = [at(builder, c, start, j) for start in starts for j in _COLUMNS]
        for place in to:
            prefetch(builder, place, first=True)
        with builder.if_then(builder.icmp_signed("!=", minima, minima.type(0))):
            _for_each_block(builder, n, cells, _emit_minima, a_sides, b_sides)
        _for_each_block(builder, n, cells, _emit_products, a_sides, b_sides, a, b)
        added = builder.icmp_signed("!=", accumulate, accumulate.type(0))
        with builder.if_else(added) as parts:
            for part, old in zip(parts, (True, False), strict=True):
                with part:
                    _store_sums(builder, cells, to, old)
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 9), codegen


def _store_sums(builder: Any, cells: list[Any], to: list[Any], accumulate: bool) -> None:
    for cell, place in zip(cells, to, strict=True):
        value = builder.load(cell)
        if accumulate:
            value = builder.fadd(load(builder, place, _NUMBERS), value)
        store(builder, value, place)


def _for_each_block(builder: Any, n: Any, cells: list[Any], emit: Any, *sides: Any) -> None:
    """n times, sums in cells = emit(number of the block, *sides, sums)."""
    with cgutils.for_range_slice(builder, n.type(0), n, n.type(1)) as (i, _):
        sums = emit(builder, i, *sides, [builder.load(cell) for cell in cells])
        for cell, value in zip(cells, sums, strict=True):
            builder.store(value, cell)


def _emit_minima(builder: Any, i: Any, a_sides: Any, b_sides: Any, sums: list[Any]) -> list[Any]:
    """sums + total · minimum of one block."""
    totals, minima = _side(builder, i, a_sides, 2), _beside(builder, i, b_sides, BLOCKS)
    pairs = [(total, minimum) for total in totals for minimum in minima]
    return [fma(builder, *pair, old) for pair, old in zip(pairs, sums, strict=True)]


def _emit_products(
    builder: Any, i: Any, a_sides: Any, b_sides: Any, a: Any, b: Any, sums: list[Any]
) -> list[Any]:
    """sums + a_scale · b_scale · (start + Σ a·b) of one block of GROUP numbers."""
    whole = _emit_whole(builder, i, a, b, a_sides)
    scales, others = _side(builder, i, a_sides, 0), _beside(builder, i, b_sides, 0)
    pairs = [(scale, other) for scale in scales for other in others]
    return [
        fma(builder, builder.fmul(builder.sitofp(q, _NUMBERS), other), scale, old)
        for q, (scale, other), old in zip(whole, pairs, sums, strict=True)
    ]


def _emit_whole(builder: Any, i: Any, a: Any, b: Any, a_sides: Any) -> list[Any]:
    """start + Σ a·b of block i, for each row of the tile its vectors."""
    a_at, b_at = (builder.mul(i, ir.Constant(I64, QUADS * n)) for n in (MR, BYTE_PANEL))
    starts = _side(builder, i, a_sides, 1)
    sums = [builder.bitcast(start, _INTS) for start in starts for _ in _COLUMNS]
    for k in range(QUADS):
        places = [at(builder, b, b_at, k * BYTE_PANEL + j) for j in _COLUMNS]
        columns = [load(builder, place, _INTS) for place in places]
        for m in range(MR):
            place = builder.bitcast(at(builder, a, a_at, k * MR + m), I32.as_pointer())
            x = broadcast(builder, builder.load(place), _INTS)
            for j, column in enumerate(columns, m * BYTE_NV):
                sums[j] = by_quads(builder, column, x, sums[j], CHOSEN.vnni)
    return sums


def _side(builder: Any, i: Any, a_sides: Any, which: int) -> list[Any]:
    """One number of each row in block i, in every lane."""
    here = builder.mul(i, ir.Constant(I64, 3 * MR))
    places = [at(builder, a_sides, here, which * MR + m) for m in range(MR)]
    return [broadcast(builder, builder.load(place), _NUMBERS) for place in places]


def _beside(builder: Any, i: Any, b_sides: Any, first: int) -> list[Any]:
    """One number of each column in block `first` + i."""
    here = builder.mul(i, ir.Constant(I64, BYTE_PANEL))
    places = [at(builder, b_sides, here, first * BYTE_PANEL + j) for j in _COLUMNS]
    return [load(builder, place, _NUMBERS) for place in places]
