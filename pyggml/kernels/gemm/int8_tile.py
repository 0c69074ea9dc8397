"""LLVM code of the products in integers: weights unpacked to bytes, and the microkernel.

unpack_bytes      blocks of a type of KINDS -> a row's bytes, then its scales, then its minima
quantize_columns  floats of W's rows -> bytes and scales of its columns
byte_product      the microkernel of BYTE_TILE: C (MR, PANEL) (+)= Σ of the products of blocks

A block is GROUP = 32 numbers along the depth. The sum of its products of bytes is exact in int32;
it becomes a float32, which the block's two scales multiply. Weights are multiplied as q + MOVED,
unsigned on x86; x is signed (see pyggml.kernels.gemm.activations).

x86 without VNNI adds products in 16 bits, where two products of any bytes leave no room for more:
one core of a Zen 5 makes 220 GFLOP/s. So weights of few bits have tiles of their own there, which
make 270 to 380 (pyggml.kernels.gemm.few_bits_tile); of float32 it makes 130.
"""

from typing import Any, NamedTuple

from llvmlite import ir

from pyggml.graph.dtypes import dtype
from pyggml.jit import cgutils, instruction, types
from pyggml.jit.isa import CHOSEN
from pyggml.jit.llvm import (
    F32,
    I8,
    I16,
    I32,
    I64,
    OFFSET,
    at,
    declare_intrinsic,
    each_in_all_lanes,
    every,
    fma,
    in_order,
    load,
    prefetch,
    shuffle,
    store,
)
from pyggml.kernels.gemm.activations import BLOCK_WORDS, largest, round_product, scale_of
from pyggml.kernels.gemm.dots import step
from pyggml.kernels.gemm.microkernel import in_turns, put_tile, rows_of_squares, tile_at, zeros
from pyggml.kernels.gemm.tile import BYTE_TILE
from pyggml.quants.layout import GROUP, SUBGROUP
from pyggml.quants.readers.vectors import F32X16, VectorBlock, emit_blocks, vector_of
from pyggml.quants.unpack import INTEGER_TYPES, LAYOUTS

KINDS = list(INTEGER_TYPES)

LANES, MR, NV, PANEL = BYTE_TILE.lanes, BYTE_TILE.mr, BYTE_TILE.nv, BYTE_TILE.panel
_COLUMNS = range(0, PANEL, LANES)

# Numbers of k in one pass: C is read and written once for all of them. Forward they lie in a row of
# W, backward in as many rows.
FORWARD_DEPTH, BACKWARD_DEPTH = 1024, 512
BLOCKS = FORWARD_DEPTH // GROUP  # of a pass; backward uses half of them
WORDS = BLOCKS * BLOCK_WORDS  # of their bytes
ROW_WORDS = WORDS + 2 * BLOCKS  # of a row of W in bytes: these, scales, minima

_IN_PAIRS = CHOSEN.byte_pairs
MOVED = 0 if _IN_PAIRS else OFFSET
_NUMBERS, _INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
_SHORTS = ir.VectorType(I16, GROUP)


class _Rounding(NamedTuple):
    """How weights become bytes of another scale, in 16 bits: (high half of (q << raised) · factor,
    + offset) >> bits. Vectors with a number for each SUBGROUP; offsets hold MOVED, and the half
    that rounds to the nearest."""

    factors: Any
    offsets: Any
    raised: int
    bits: int


def _each_of_pairs(b: Any, numbers: Any) -> tuple[Any, Any]:
    """Of every two neighbours the first in both places, and the second."""
    n = numbers.type.count
    orders = ([i // 2 * 2 + which for i in range(n)] for which in range(2))
    first, second = (shuffle(b, order, numbers) for order in orders)
    return first, second


def _extreme(b: Any, two: tuple[Any, Any], which: str) -> Any:
    """The lesser (<) or the larger (>) of two floats, lane by lane."""
    return b.select(b.fcmp_ordered(which, *two), *two)


def _high_halves(b: Any, x: Any, y: Any) -> Any:
    """The upper 16 bits of products, one instruction on x86."""
    wide = ir.VectorType(I32, GROUP)
    product = b.mul(b.sext(x, wide), b.sext(y, wide))
    return b.trunc(b.ashr(product, every(wide, 16)), _SHORTS)


def _by_subgroup(b: Any, numbers: Any, i: int) -> Any:
    """The number of its subgroup in each lane of GROUP weights, from weight i on."""
    return shuffle(b, ((i + lane) // SUBGROUP for lane in range(GROUP)), numbers)


class BytesOut(VectorBlock):
    """A decoder's target that writes bytes, scales and minima to these addresses."""

    def __init__(self, builder: Any, source: Any, q: Any, scales: Any, minima: Any) -> None:
        super().__init__(builder, source)
        self._q, self._scales, self._minima = q, scales, minima

    def _put(self, q: Any, i: int) -> None:
        words = self.b.bitcast(q, ir.VectorType(I32, BLOCK_WORDS))
        store(self.b, words, at(self.b, self._q, ir.Constant(I64, i // 4)))

    def add_minimum(self, minimum: Any) -> None:
        self.b.store(minimum, at(self.b, self._minima, ir.Constant(I64, 0)))

    def add_minima(self, minima: Any) -> None:
        store(self.b, minima, at(self.b, self._minima, ir.Constant(I64, 0)))


class _Bytes(BytesOut):
    """It writes GROUP bytes q + MOVED per scale, and minima, one of each for 32 weights."""

    _of_subgroups: Any = None  # minima
    _rounding: _Rounding | None = None

    def add(self, scale: Any, q: Any, i: int = 0) -> None:
        self._put(self.b.xor(q, every(q.type, -MOVED)) if MOVED else q, i)
        self.b.store(scale, at(self.b, self._scales, ir.Constant(I64, i // GROUP)))

    def add_two(self, scales: tuple[Any, Any], q: Any, i: int, most: int) -> None:
        """Both subgroups get one scale, and their weights are rounded to it. All scales of a block
        are lanes of one vector, so that they are dealt with at once."""
        b = self.b
        if self._rounding is None:
            self._rounding = self._round_to_one_scale(vector_of(scales[0]), most)
        r = self._rounding
        q = b.shl(b.sext(q, _SHORTS), every(_SHORTS, r.raised))
        product = _high_halves(b, q, _by_subgroup(b, r.factors, i))
        moved = b.add(product, _by_subgroup(b, r.offsets, i))
        shift, is_below = (b.lshr, b.icmp_unsigned) if MOVED else (b.ashr, b.icmp_signed)
        whole, largest_byte = shift(moved, every(_SHORTS, r.bits)), every(_SHORTS, 127 + MOVED)
        inside = b.select(is_below("<", whole, largest_byte), whole, largest_byte)
        self._put(b.trunc(inside, ir.VectorType(I8, GROUP)), i)

    def _round_to_one_scale(self, scales: Any, most: int) -> _Rounding:
        """Store the scale of each two subgroups; returns how their weights are rounded to it."""
        if self._of_subgroups is None:
            part, distances, largest = self._part_of_larger(scales, most), None, 128 // most
        else:
            part, distances = self._part_of_range(scales, most)
            largest = 254 // most
        self._store_firsts(part, self._scales)
        b, zero = self.b, every(part.type, 0.0)
        not_zero = b.fcmp_unordered("une", part, zero)
        inverse = b.select(not_zero, b.fdiv(every(part.type, 1.0), part), zero)
        of_factor, raised = (15 - n.bit_length() for n in (largest, most))  # they fill 16 bits
        bits = of_factor + raised - 16
        factors = self._shorts(scales, inverse, of_factor)
        offsets = every(factors.type, (1 << bits >> 1) + (MOVED << bits))
        if distances is not None:
            offsets = b.add(offsets, self._shorts(distances, inverse, bits))
        return _Rounding(factors, offsets, raised, bits)

    def _shorts(self, numbers: Any, inverse: Any, bits: int) -> Any:
        """numbers · inverse · 2^bits, rounded to 16 bits."""
        per_part = self.b.fmul(inverse, every(inverse.type, float(1 << bits)))
        whole = round_product(self.b, numbers, per_part)
        return self.b.trunc(whole, ir.VectorType(I16, numbers.type.count))

    def _part_of_larger(self, scales: Any, most: int) -> Any:
        """A part of the larger of two scales: the smallest with which q fits into bytes. The
        other's weights are rounded to it; of Q6_K, by quarters, which adds a 16th of the variance
        that the larger scale's own rounding has."""
        b = self.b
        kind, pair = scales.type, _each_of_pairs(b, scales)
        fabs = declare_intrinsic(b, f"llvm.fabs.v{kind.count}f32", kind, [kind])
        sizes = [b.call(fabs, [one]) for one in pair]
        larger = b.select(b.fcmp_unordered("uge", *sizes), *pair)
        return b.fmul(larger, every(kind, 1 / (128 // most)))

    def _part_of_range(self, scales: Any, most: int) -> tuple[Any, Any]:
        """Subgroups with minima of their own, q from 0 to `most`: steps of a 254th from the least
        weight that both can have to the largest, around one minimum in their middle; and how far
        each one's minimum lies from it."""
        b, minima = self.b, self._of_subgroups
        ends = minima, b.fadd(b.fmul(scales, every(scales.type, float(most))), minima)
        lower, upper = (_extreme(b, ends, which) for which in "<>")
        least, largest = (
            _extreme(b, _each_of_pairs(b, bounds), which)
            for bounds, which in ((lower, "<"), (upper, ">"))
        )
        middle = b.fmul(b.fadd(least, largest), every(scales.type, 0.5))
        self._store_firsts(middle, self._minima)
        part = b.fmul(b.fsub(largest, least), every(scales.type, 1 / 254))
        return part, b.fsub(minima, middle)

    def _store_firsts(self, numbers: Any, to: Any) -> None:
        """Store the first of each two floats, the one for GROUP weights."""
        halves = shuffle(self.b, range(0, numbers.type.count, 2), numbers)
        store(self.b, halves, at(self.b, to, ir.Constant(I64, 0)))

    def add_minima(self, minima: Any) -> None:
        if minima.type == F32X16:
            self._of_subgroups = minima
        else:
            super().add_minima(minima)


@instruction(lambda to, source, n: types.void(to, source, types.intp), n_constants=1)
def unpack_bytes(builder: Any, kind: int, to: Any, source: Any, n: Any) -> None:
    """n blocks of type KINDS[kind], a constant, to a row of ROW_WORDS; pointers."""
    name, source, q = KINDS[kind], builder.ptrtoint(source, I64), builder.ptrtoint(to, I64)
    scales, minima = (builder.add(q, ir.Constant(I64, 4 * at)) for at in (WORDS, WORDS + BLOCKS))
    many = step(dtype(name))
    sizes = dtype(name).block_bytes, many, many // BLOCK_WORDS, many // BLOCK_WORDS
    emit_blocks(builder, LAYOUTS[name], n, (source, q, scales, minima), sizes, _Bytes)


@instruction(types.void(*(types.intp,) * 4))
def quantize_columns(builder: Any, to: Any, scales: Any, rows: Any, row_step: Any) -> None:
    """LANES columns of GROUP rows of floats to BLOCK_WORDS vectors of bytes q + MOVED, PANEL words
    apart (in pairs for `square`), and to the columns' scales; addresses, row_step in floats."""
    starts = [builder.mul(row_step, ir.Constant(I64, i)) for i in range(GROUP)]
    values = [load(builder, at(builder, rows, start), _NUMBERS) for start in starts]
    scale, per_scale = scale_of(builder, largest(builder, values))
    store(builder, scale, at(builder, scales, ir.Constant(I64, 0)))
    n_together = 2 if BYTE_TILE.square else 1
    for word in range(0, BLOCK_WORDS, n_together):
        numbers = (values[4 * i : 4 * i + 4] for i in range(word, word + n_together))
        packed = [_word_of(builder, four, per_scale) for four in numbers]
        for i, words in enumerate(in_turns(builder, packed)):
            store(builder, words, at(builder, to, ir.Constant(I64, word * PANEL + i * LANES)))


def _word_of(builder: Any, values: list[Any], per_scale: Any) -> Any:
    """Vectors of four numbers of columns as words of bytes."""
    words = every(_INTS, 0)
    for n, v in enumerate(values):
        q = builder.add(round_product(builder, v, per_scale), every(_INTS, MOVED))
        byte = builder.and_(q, every(_INTS, 255))
        words = builder.or_(words, builder.shl(byte, every(_INTS, 8 * n)))
    return words


@instruction(types.void(*(types.intp,) * 9))
def byte_product(
    builder: Any, a: Any, a_terms: Any, b: Any, b_terms: Any, c: Any, ldc: Any, n: Any,
    minima: Any, accumulate: Any,
) -> None:  # fmt: skip
    """C (MR, PANEL) (+)= Σ over n blocks of scale_a · scale_b · (start + Σ a·b), and of
    total · minimum unless `minima` is 0.

    a        (n · BLOCK_WORDS, MR) words of signed bytes; where BYTE_TILE has `square`, they lie in
             pairs: (n · BLOCK_WORDS / 2, MR, 2), and those of b likewise
    a_terms  (n, 3, MR): scale, start (int32) and total of each block of a row
    b        (n · BLOCK_WORDS, PANEL) words of bytes q + MOVED
    b_terms  (2, BLOCKS, PANEL): scales, then minima
    c        rows ldc floats apart, overwritten unless accumulate is not 0

    All are addresses.
    """

    cells, to = zeros(builder, _NUMBERS, MR * NV), tile_at(builder, c, ldc, BYTE_TILE)
    for target in to:
        prefetch(builder, target, first=True)
    with builder.if_then(builder.icmp_signed("!=", minima, minima.type(0))):
        _for_each_block(builder, n, cells, _emit_minima, a_terms, b_terms)
    _for_each_block(builder, n, cells, _emit_products, a_terms, b_terms, a, b)
    put_tile(builder, [builder.load(cell) for cell in cells], to, accumulate)


def _for_each_block(builder: Any, n: Any, cells: list[Any], emit: Any, *arrays: Any) -> None:
    """n times, sums in cells = emit(number of the block, *arrays, sums)."""
    with cgutils.for_range_slice(builder, n.type(0), n, n.type(1)) as (i, _):
        sums = emit(builder, i, *arrays, [builder.load(cell) for cell in cells])
        for cell, value in zip(cells, sums, strict=True):
            builder.store(value, cell)


def _emit_minima(builder: Any, i: Any, a_terms: Any, b_terms: Any, sums: list[Any]) -> list[Any]:
    """sums + total · minimum of one block."""
    totals, minima = _of_rows(builder, i, a_terms, 2), _of_columns(builder, i, b_terms, BLOCKS)
    pairs = [(total, minimum) for total in totals for minimum in minima]
    return [fma(builder, *pair, old) for pair, old in zip(pairs, sums, strict=True)]


def _emit_products(
    builder: Any, i: Any, a_terms: Any, b_terms: Any, a: Any, b: Any, sums: list[Any]
) -> list[Any]:
    """sums + scale_a · scale_b · (start + Σ a·b) of one block."""
    multiply = _emit_squares if BYTE_TILE.square else _emit_whole
    whole = multiply(builder, i, a, b, a_terms)
    scales, column_scales = _of_rows(builder, i, a_terms, 0), _of_columns(builder, i, b_terms, 0)
    pairs = [(scale, other) for scale in scales for other in column_scales]
    return [
        fma(builder, builder.fmul(builder.sitofp(q, _NUMBERS), other), scale, old)
        for q, (scale, other), old in zip(whole, pairs, sums, strict=True)
    ]


def _emit_whole(builder: Any, i: Any, a: Any, b: Any, a_terms: Any) -> list[Any]:
    """start + Σ a·b of block i, for each row of the tile its vectors."""
    a_at, b_at = (builder.mul(i, ir.Constant(I64, BLOCK_WORDS * n)) for n in (MR, PANEL))
    starts = _of_rows(builder, i, a_terms, 1)
    sums = [builder.bitcast(start, _INTS) if MOVED else every(_INTS, 0)
            for start in starts for _ in _COLUMNS]  # fmt: skip
    rows = each_in_all_lanes(builder, a, a_at, BLOCK_WORDS * MR)
    for k in range(BLOCK_WORDS):
        words = [at(builder, b, b_at, k * PANEL + j) for j in _COLUMNS]
        columns = [load(builder, word, _INTS) for word in words]
        for m in range(MR):
            x = rows(k * MR + m, _INTS)
            for j, column in enumerate(columns, m * NV):
                sums[j] = BYTE_TILE.inner(builder, x, column, sums[j])
        if _IN_PAIRS:
            sums = in_order(builder, sums)
    return sums


def _emit_squares(builder: Any, i: Any, a: Any, b: Any, a_terms: Any) -> list[Any]:
    """The same by products of matrices (SMMLA); words of a row, and of a column, lie in pairs."""
    a_at, b_at = (builder.mul(i, ir.Constant(I64, BLOCK_WORDS * n)) for n in (MR, PANEL))
    sums, square = [[every(_INTS, 0)] * (PANEL // 2) for _ in range(MR // 2)], BYTE_TILE.square
    assert square is not None
    for k in range(0, BLOCK_WORDS, 2):
        columns = [
            load(builder, at(builder, b, b_at, k * PANEL + j), _INTS)
            for j in range(0, 2 * PANEL, LANES)
        ]
        for m, row in enumerate(sums):
            rows = load(builder, at(builder, a, a_at, k * MR + m * LANES), _INTS)
            sums[m] = [square(builder, rows, *pair) for pair in zip(columns, row, strict=True)]
    return [vector for row in rows_of_squares(builder, sums) for vector in row]


def _of_rows(builder: Any, i: Any, a_terms: Any, which: int) -> list[Any]:
    """One term of each row in block i, in every lane."""
    here = builder.mul(i, ir.Constant(I64, 3 * MR))
    rows = each_in_all_lanes(builder, a_terms, here, 3 * MR)
    return [rows(which * MR + m, _NUMBERS) for m in range(MR)]


def _of_columns(builder: Any, i: Any, b_terms: Any, first: int) -> list[Any]:
    """One term of each column in block `first` + i."""
    here = builder.mul(i, ir.Constant(I64, PANEL))
    terms = [at(builder, b_terms, here, first * PANEL + j) for j in _COLUMNS]
    return [load(builder, term, _NUMBERS) for term in terms]
