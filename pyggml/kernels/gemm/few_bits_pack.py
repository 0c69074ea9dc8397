"""LLVM code that packs weights of few bits, and what they multiply, for x86 that adds products of
bytes in 16 bits (pyggml.kernels.gemm.few_bits_tile).

Weights W = s · q + m are multiplied as they are, q whole: there is room for up to eight words of
products in 16 bits, where two products of any bytes leave none. One factor must be unsigned. It is
q, but for weights of 6 bits, which have room only around 0: then the other is moved by 128, and a
start is −128 · Σ q of a column of B.

Forward, y = x · Wᵀ, x is rounded to bytes, with one scale for 32 (round_to_bytes, put_terms or
put_two_terms, product_of_rows). Where 16 weights share a scale, sums in 16 bits are multiplied with
it as they are widened.

Backward, dx = dy · W is a sum over rows of W, but some columns of a row share s and m. For these
alone, dy is multiplied with s and rounded by one product of 16 bits, VPMULHRSW. Here all q lie
around 0, as they multiply what was rounded (put_columns, put_factors, round_to_shorts, scale_rows,
product_of_columns):

    dx_k = Σ_n round(dy_n · s_n) · q_nk + Σ_n dy_n · m_n
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from llvmlite import ir

from pyggml.graph.dtypes import dtype
from pyggml.jit import cgutils, instruction, types
from pyggml.jit.llvm import (
    F32,
    I8,
    I16,
    I32,
    I64,
    alternate,
    at,
    broadcast,
    declare_intrinsic,
    every,
    fma,
    load,
    shuffle,
    sixteen_bit_sums,
    store,
    total,
    widened_pairs,
)
from pyggml.kernels.gemm.activations import BLOCK_WORDS, largest, round_product, scale_of
from pyggml.kernels.gemm.int8_tile import BytesOut
from pyggml.kernels.gemm.microkernel import zeros
from pyggml.kernels.gemm.row_plan import whole_range
from pyggml.kernels.gemm.tile import BYTE_TILE
from pyggml.quants.layout import GROUP, SUBGROUP
from pyggml.quants.readers.vectors import emit_blocks
from pyggml.quants.unpack import INTEGER_TYPES, LAYOUTS, MINIMA_TYPES

LANES, MR, PANEL = BYTE_TILE.lanes, BYTE_TILE.mr, BYTE_TILE.panel
# Numbers of k in one pass: C is read and written once for all of them. Forward they lie in a row of
# W, backward in as many rows.
FORWARD_DEPTH, BACKWARD_DEPTH = 1024, 512
SCALES = FORWARD_DEPTH // SUBGROUP  # of a row of W, at most
ROW_WORDS = 2 * SCALES + FORWARD_DEPTH // 4  # of a row: scales, minima, bytes q
TERMS = 4  # vectors of a block forward: scale and minimum; where two scales, start, unit and these
SHORTS = GROUP // 2  # words of GROUP numbers of 16 bits
FACTOR_WORDS = 2 * SHORTS + 2  # of `put_factors`: s, m, and what a unit of each is
_MOVED, _MOST_BYTE = 128, 127
_MOST_DY, _MOST_S = 127 << 5, 1 << 10  # whose product is 127 << 15
_MOST_M = (1 << 15) - 1
_MOST_OF_TWO = (1 << 12) - 1  # a block's sum of products with it has 32 bits

NUMBERS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
BYTES, PAIRS = ir.VectorType(I8, 4 * LANES), ir.VectorType(I16, 2 * LANES)


@cache
def centre(name: str) -> tuple[int, int]:
    """(what is subtracted from a type's weights u = q + zero, 0 to `most`, so that they lie around
    0; words whose products are then summed in 16 bits: 8, 4, 2, or 0 if none can)."""
    _, most, _ = whole_range(name)
    half = (most + 1) // 2
    n = _MOST_M // (2 * 255 * half)
    return half, next((words for words in (8, 4, 2) if words <= n), 0)


def move(name: str, centred: bool) -> int:
    """By how many scales the minima of bytes u, or u − half, are above the type's own."""
    return centre(name)[0] * centred - whole_range(name)[0]


def columns_of(name: str) -> int:
    """Neighbours in a row that have one scale."""
    return GROUP if whole_range(name)[2] else SUBGROUP


class _FewBits(BytesOut):
    """It writes bytes u, or u − half."""

    def __init__(self, name: str, centred: bool, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._move, self._each = -move(name, centred), columns_of(name)
        self._has_minima = name in MINIMA_TYPES

    def add(self, scale: Any, q: Any, i: int = 0) -> None:
        self.add_two((scale,), q, i, 0)

    def add_two(self, scales: Sequence[Any], q: Any, i: int, most: int) -> None:
        self._put(self.b.add(q, every(q.type, self._move)) if self._move else q, i)
        for n, scale in enumerate(scales):
            here = ir.Constant(I64, i // self._each + n)
            self.b.store(scale, at(self.b, self._scales, here))
            if not self._has_minima:
                self.b.store(ir.Constant(F32, 0.0), at(self.b, self._minima, here))


@instruction(lambda to, source, n: types.void(to, source, types.intp), n_constants=2)
def few_bits(builder: Any, kind: int, centred: int, to: Any, source: Any, n: Any) -> None:
    """n blocks of INTEGER_TYPES[kind] to a row of ROW_WORDS, centred or not, constants; pointers to
    both."""
    name, scales = INTEGER_TYPES[kind], builder.ptrtoint(to, I64)
    minima, q = (builder.add(scales, ir.Constant(I64, 4 * part * SCALES)) for part in (1, 2))
    many = max(dtype(name).block, GROUP)
    terms = 4 * many // columns_of(name)
    sizes, bases = (
        (dtype(name).block_bytes, many, terms, terms),
        (builder.ptrtoint(source, I64), q, scales, minima),
    )
    block = partial(_FewBits, name, bool(centred))
    emit_blocks(builder, LAYOUTS[name], n, bases, sizes, block)


def addresses(*kinds: Any) -> Any:
    return types.void(*(types.intp,) * len(kinds))


@instruction(addresses)
def put_columns(
    builder: Any, to: Any, starts: Any, step: Any, rows: Any, row_step: Any, n: Any
) -> None:
    """Panels of PANEL columns of GROUP rows of bytes, row_step words apart, to BLOCK_WORDS vectors
    of words of four rows, and to the columns' starts, `step` words from panel to panel; addresses,
    n panels."""
    with cgutils.for_range(builder, n) as loop:
        words, place = [], builder.mul(loop.index, step)
        first = builder.mul(loop.index, ir.Constant(I64, PANEL // 4))
        for quad in range(BLOCK_WORDS):
            four = [_bytes_of_row(builder, rows, row_step, 4 * quad + i, first) for i in range(4)]
            pairs = [alternate(builder, *four[i : i + 2]) for i in (0, 2)]
            pairs = [builder.bitcast(pair, ir.VectorType(I16, PANEL)) for pair in pairs]
            words.append(builder.bitcast(alternate(builder, *pairs), INTS))
            store(builder, words[-1], at(builder, to, place, quad * PANEL))
        store(builder, _start(builder, words), at(builder, starts, place))


def _bytes_of_row(builder: Any, rows: Any, row_step: Any, row: int, first: Any) -> Any:
    place = builder.add(builder.mul(row_step, ir.Constant(I64, row)), first)
    return load(builder, at(builder, rows, place), ir.VectorType(I8, PANEL))


def _start(builder: Any, words: list[Any]) -> Any:
    """−128 · Σ q of each column of words."""
    return pair_products(builder, _sums_of(builder, words), every(PAIRS, -_MOVED))


def _sums_of(builder: Any, words: list[Any]) -> Any:
    """Σ q of each column of words, in two parts of 16 bits."""
    sums = None
    for word in words:
        sums = sixteen_bit_sums(builder, every(BYTES, 1), builder.bitcast(word, BYTES), sums)
    return sums


def pair_products(builder: Any, a: Any, b: Any) -> Any:
    """The sums of two products of 16 bits each, in 32 bits."""
    add = declare_intrinsic(builder, "llvm.x86.avx2.pmadd.wd", INTS, [PAIRS, PAIRS])
    return builder.call(add, [a, b])


@instruction(addresses)
def put_terms(builder: Any, terms: Any, n: Any, moved: Any) -> None:
    """n blocks' TERMS, scales s and minima m: these become m + s · moved; an address."""
    by = broadcast(builder, builder.sitofp(moved, F32), NUMBERS)
    with cgutils.for_range(builder, n) as loop:
        scale, minimum = terms_of(builder, terms, loop.index, TERMS // 2)
        scales, minima = (load(builder, place, NUMBERS) for place in (scale, minimum))
        store(builder, fma(builder, scales, by, minima), minimum)


@instruction(addresses)
def put_two_terms(builder: Any, terms: Any, words: Any, n: Any) -> None:
    """n blocks' TERMS, whose second and last are scales: these become whole numbers of 16 bits, of
    a unit of the columns' own; the starts of the blocks' words are added. Addresses."""
    with cgutils.for_range(builder, n) as loop:
        start, unit_at, *to = terms_of(builder, terms, loop.index)
        scales = [load(builder, place, NUMBERS) for place in (unit_at, to[1])]
        unit, per_unit = scale_of(builder, largest(builder, scales), float(_MOST_OF_TWO))
        store(builder, unit, unit_at)
        sums, q = every(INTS, 0), _words_of(builder, words, loop.index)
        for half, (scale, place) in enumerate(zip(scales, to, strict=True)):
            whole = builder.and_(round_product(builder, scale, per_unit), every(INTS, 0xFFFF))
            twice = builder.or_(whole, builder.shl(whole, every(INTS, 16)))
            store(builder, twice, place)
            own = _sums_of(builder, q[half * BLOCK_WORDS // 2 : (half + 1) * BLOCK_WORDS // 2])
            part = pair_products(builder, own, builder.bitcast(twice, PAIRS))
            sums = builder.add(sums, part)
        store(builder, builder.mul(sums, every(INTS, -_MOVED)), start)


def terms_of(builder: Any, terms: Any, i: Any, n: int = TERMS) -> list[Any]:
    place = builder.mul(i, ir.Constant(I64, n * PANEL))
    return [at(builder, terms, place, which * PANEL) for which in range(n)]


def _words_of(builder: Any, words: Any, i: Any) -> list[Any]:
    place = builder.mul(i, ir.Constant(I64, BLOCK_WORDS * PANEL))
    places = [at(builder, words, place, word * PANEL) for word in range(BLOCK_WORDS)]
    return [load(builder, here, INTS) for here in places]


def _to_shorts(builder: Any, values: list[Any], per_unit: Any) -> list[Any]:
    """GROUP floats · per_unit as whole numbers: two registers of 16 bits."""
    name = "llvm.x86.avx2.packssdw"
    pack = declare_intrinsic(builder, name, PAIRS, [INTS, INTS])
    whole = [round_product(builder, v, per_unit) for v in values]
    return [builder.call(pack, whole[i : i + 2]) for i in (0, 2)]


def _group_to_shorts(builder: Any, values: list[Any], most: int) -> tuple[list[Any], Any]:
    """GROUP floats as whole numbers of 16 bits up to `most`, and the float that one of them is."""
    bits = builder.bitcast(largest(builder, values), INTS)
    name = f"llvm.vector.reduce.umax.v{LANES}i32"
    greatest = builder.call(declare_intrinsic(builder, name, I32, [INTS]), [bits])
    unit, per_unit = scale_of(builder, builder.bitcast(greatest, F32), float(most))
    return _to_shorts(builder, values, broadcast(builder, per_unit, NUMBERS)), unit


def _four_vectors(builder: Any, base: Any, first: Any) -> list[Any]:
    return [load(builder, at(builder, base, first, j), NUMBERS) for j in range(0, GROUP, LANES)]


def _put_shorts(builder: Any, shorts: list[Any], to: Any, first: Any) -> None:
    for i, register in enumerate(shorts):
        store(builder, builder.bitcast(register, INTS), at(builder, to, first, i * LANES))


@instruction(addresses)
def put_factors(builder: Any, to: Any, scales: Any, minima: Any, move: Any) -> None:
    """The scales s of GROUP rows, and their minima m + s · move, to FACTOR_WORDS; addresses, but
    for the whole number `move`."""
    s, m = (_four_vectors(builder, base, ir.Constant(I64, 0)) for base in (scales, minima))
    moved = broadcast(builder, builder.sitofp(move, F32), NUMBERS)
    m = [fma(builder, v, moved, minimum) for v, minimum in zip(s, m, strict=True)]
    for i, (values, most) in enumerate(((s, _MOST_S), (m, _MOST_M))):
        shorts, unit = _group_to_shorts(builder, values, most)
        _put_shorts(builder, shorts, to, ir.Constant(I64, i * SHORTS))
        unit = unit if i else builder.fmul(unit, ir.Constant(F32, float(1 << 15)))
        builder.store(unit, at(builder, to, ir.Constant(I64, 2 * SHORTS + i)))


@instruction(addresses)
def round_to_shorts(builder: Any, to: Any, units: Any, x: Any, n: Any) -> None:
    """n blocks of a row of dy to SHORTS words each, MR · SHORTS apart, and to a float each, LANES
    apart; addresses."""
    with cgutils.for_range(builder, n) as loop:
        values = _four_vectors(builder, x, builder.mul(loop.index, ir.Constant(I64, GROUP)))
        shorts, unit = _group_to_shorts(builder, values, _MOST_DY)
        step = builder.mul(loop.index, ir.Constant(I64, MR * SHORTS))
        _put_shorts(builder, shorts, to, step)
        builder.store(unit, at(builder, units, builder.mul(loop.index, ir.Constant(I64, LANES))))


@instruction(addresses)
def round_to_bytes(builder: Any, to: Any, terms: Any, x: Any, n: Any, moved: Any) -> None:
    """n blocks of a row of x to bytes, + 128 if `moved` is not 0, MR · BLOCK_WORDS words apart, and
    to their scales and their totals, scale · Σ bytes, LANES apart; addresses."""
    plain = builder.icmp_signed("==", moved, moved.type(0))
    by = builder.select(plain, every(BYTES, 0), every(BYTES, -_MOVED))
    with cgutils.for_range(builder, n) as loop:
        values = _four_vectors(builder, x, builder.mul(loop.index, ir.Constant(I64, GROUP)))
        shorts, scale = _group_to_shorts(builder, values, _MOST_BYTE)
        place = builder.mul(loop.index, ir.Constant(I64, MR * BLOCK_WORDS))
        _put_bytes(builder, shorts, by, at(builder, to, place))
        sums = builder.add(*(widened_pairs(builder, register) for register in shorts))
        name = f"llvm.vector.reduce.add.v{LANES}i32"
        sum_ = builder.call(declare_intrinsic(builder, name, I32, [INTS]), [sums])
        place = builder.mul(loop.index, ir.Constant(I64, 2 * LANES))
        builder.store(scale, at(builder, terms, place))
        whole = builder.fmul(scale, builder.sitofp(sum_, F32))
        builder.store(whole, at(builder, terms, place, LANES))


def _put_bytes(builder: Any, shorts: list[Any], by: Any, to: Any) -> None:
    """GROUP numbers of 16 bits as bytes, moved by a bit."""
    pack = declare_intrinsic(builder, "llvm.x86.avx2.packsswb", BYTES, [PAIRS, PAIRS])
    moved = builder.xor(builder.call(pack, shorts), by)
    store(builder, builder.bitcast(moved, INTS), to)


@instruction(addresses)
def scale_rows(
    builder: Any, to: Any, scales: Any, sums: Any, dy: Any, units: Any, factors: Any, n: Any,
    has_minima: Any,
) -> None:  # fmt: skip
    """MR rows of n blocks as `round_to_shorts` made them, with the blocks' `factors` to bytes + 128
    (n, MR, BLOCK_WORDS), to scales (n, LANES) and to sums (LANES) = Σ dy · m; addresses. Without
    minima the sums are 0."""
    cells = zeros(builder, NUMBERS, MR)
    with cgutils.for_range(builder, n) as loop:
        _scale_block(builder, loop.index, to, scales, dy, units, factors)
    are_there = builder.icmp_signed("!=", has_minima, has_minima.type(0))
    with builder.if_then(are_there), cgutils.for_range(builder, n) as loop:
        _add_minima(builder, loop.index, cells, dy, units, factors)
    for m, cell in enumerate(cells):
        value = total(builder, builder.load(cell))
        builder.store(value, at(builder, sums, ir.Constant(I64, m)))


def _shorts_at(builder: Any, base: Any, first: Any, n: int = 0) -> list[Any]:
    """GROUP numbers of 16 bits from word first + n on."""
    two = (load(builder, at(builder, base, first, n + i), INTS) for i in (0, LANES))
    return [builder.bitcast(v, PAIRS) for v in two]


def _unit_of(builder: Any, i: Any, units: Any, factors: Any, which: int) -> Any:
    """Of block i's rows, what one of the whole numbers dy · s, or dy · m, is."""
    factor = at(builder, factors, builder.mul(i, ir.Constant(I64, FACTOR_WORDS)),
                2 * SHORTS + which)  # fmt: skip
    of_rows = load(builder, at(builder, units, builder.mul(i, ir.Constant(I64, LANES))), NUMBERS)
    return builder.fmul(of_rows, broadcast(builder, builder.load(factor), NUMBERS))


def _scale_block(
    builder: Any, i: Any, to: Any, scales: Any, dy: Any, units: Any, factors: Any
) -> None:
    multiply = declare_intrinsic(builder, "llvm.x86.avx2.pmul.hr.sw", PAIRS, [PAIRS, PAIRS])
    s = _shorts_at(builder, factors, builder.mul(i, ir.Constant(I64, FACTOR_WORDS)))
    first = builder.mul(i, ir.Constant(I64, MR * SHORTS))
    bytes_at, by = builder.mul(i, ir.Constant(I64, MR * BLOCK_WORDS)), every(BYTES, -_MOVED)
    for m in range(MR):
        row = _shorts_at(builder, dy, first, m * SHORTS)
        both = [builder.call(multiply, [*pair]) for pair in zip(row, s, strict=True)]
        _put_bytes(builder, both, by, at(builder, to, bytes_at, m * BLOCK_WORDS))
    unit = _unit_of(builder, i, units, factors, 0)
    store(builder, unit, at(builder, scales, builder.mul(i, ir.Constant(I64, LANES))))


def _add_minima(builder: Any, i: Any, cells: list[Any], dy: Any, units: Any, factors: Any) -> None:
    minima = _shorts_at(builder, factors, builder.mul(i, ir.Constant(I64, FACTOR_WORDS)), SHORTS)
    first = builder.mul(i, ir.Constant(I64, MR * SHORTS))
    units_here = _unit_of(builder, i, units, factors, 1)
    for m, cell in enumerate(cells):
        row = _shorts_at(builder, dy, first, m * SHORTS)
        two = [pair_products(builder, *pair) for pair in zip(row, minima, strict=True)]
        whole = builder.sitofp(builder.add(*two), NUMBERS)
        unit = shuffle(builder, [m] * LANES, units_here)
        builder.store(fma(builder, whole, unit, builder.load(cell)), cell)
