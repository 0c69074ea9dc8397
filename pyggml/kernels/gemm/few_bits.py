"""Products with weights of few bits in bytes, on x86 without VNNI: weights as they are.

Forward the error is that of x, one scale for 32 numbers: NMSE 3e-5 for normal numbers. Backward a
sum runs over rows of W, whose scales go into dy (pyggml.kernels.gemm.few_bits_pack): 6e-5 to 8e-5.
Weights of 8 bits, and Q2_K, whose 16 weights have both a scale and a minimum, are left to
pyggml.kernels.gemm.int8.

Packed x holds for each group of MR rows, of B = K / 32 blocks: bytes (B, MR, GROUP), then floats
(B, 2, LANES): scales and totals. Packed dy: numbers of 16 bits (B, MR, GROUP), then floats (B,
LANES). A panel of W: words (k / 4, PANEL), then terms, backward starts alone.
"""

from dataclasses import replace

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import BlockCode, block_code, kernel
from pyggml.jit.frames import Bool, Floats2, Int
from pyggml.jit.isa import CHOSEN
from pyggml.jit.scratch import Array, Layout, per_thread
from pyggml.jit.simd import fill
from pyggml.jit.tasks import task_code
from pyggml.kernels.gemm.activations import BLOCK_WORDS
from pyggml.kernels.gemm.beside import scratch_of
from pyggml.kernels.gemm.few_bits_pack import (
    BACKWARD_DEPTH,
    FACTOR_WORDS,
    FORWARD_DEPTH,
    LANES,
    MR,
    PANEL,
    ROW_WORDS,
    SCALES,
    SHORTS,
    TERMS,
    centre,
    columns_of,
    few_bits,
    move,
    put_columns,
    put_factors,
    put_terms,
    put_two_terms,
    round_to_bytes,
    round_to_shorts,
    scale_rows,
)
from pyggml.kernels.gemm.few_bits_tile import product_of_columns, product_of_rows
from pyggml.kernels.gemm.frames import (
    BACKWARD_COLUMNS,
    FORWARD_COLUMNS,
    TiledProduct,
    block_matrix,
    columns_from,
    panels_code,
    rows_from,
    tiled_call,
    unpack_rows,
)
from pyggml.kernels.gemm.panels import transpose_words
from pyggml.kernels.gemm.path import Operands, Problem, ProductPath
from pyggml.kernels.gemm.tile import BYTE_TILE
from pyggml.quants.layout import GROUP
from pyggml.quants.unpack import INTEGER_TYPES, MINIMA_TYPES
from pyggml.sizes import round_up

_BYTES_AT = 2 * SCALES  # in a row of W
_ROW_PANEL = FORWARD_DEPTH // 4 * PANEL  # words of a panel forward, then its terms
_ROW_STEP = _ROW_PANEL + FORWARD_DEPTH // GROUP * TERMS * PANEL
BLOCKS = BACKWARD_DEPTH // GROUP
_COLUMN_PANEL = BACKWARD_DEPTH // 4 * PANEL  # the same backward, then starts
_COLUMN_STEP = _COLUMN_PANEL + BLOCKS * PANEL
_X, _X_TERMS = MR * BLOCK_WORDS, 2 * LANES  # words of a block
_DY, _DY_TERMS = MR * SHORTS, LANES
_SCALED = BLOCKS * MR * BLOCK_WORDS  # words of a group's bytes; then scales, and sums


class FewBitsProduct(TiledProduct):
    """A product with weights of few bits."""

    one_scale: Int  # neighbours in a row of W with one scale
    together: Int  # words that are summed in 16 bits
    moved: Int  # scales by which minima are moved
    has_minima: Bool
    factors: Floats2  # of each thread: (groups of columns, BLOCKS, FACTOR_WORDS)
    scaled: Floats2  # of each thread: a group of dy's rows as bytes


@kernel
def _group(packed, depth, group, k0, size, n_terms):
    """The numbers of a group of rows from k0 on, `size` words a block, and its terms."""
    n, first = depth // GROUP, k0 // GROUP
    mine = packed[group * n * (size + n_terms) : (group + 1) * n * (size + n_terms)]
    return mine[first * size : n * size], mine[n * size + first * n_terms :]


@task_code(FewBitsProduct)
def _pack_task(f, task, thread):
    """Pack one group of A's rows."""
    n, forward = f.k // GROUP, f.factors.shape[1] == 0
    size, n_terms = (_X, _X_TERMS) if forward else (_DY, _DY_TERMS)
    numbers, terms = _group(f.packed_a, f.k, task, np.int64(0), size, n_terms)
    fill(terms, np.float32(0))
    if (task + 1) * MR > f.m:
        fill(numbers, np.float32(0))
    for i in range(min(MR, f.m - task * MR)):
        row, row_terms = numbers[i * (size // MR) :], terms[i:].ctypes.data
        of = f.a[(task * MR + i) * f.lda :].ctypes.data
        if forward:
            round_to_bytes(row.ctypes.data, row_terms, of, n, f.one_scale < GROUP)
        else:
            round_to_shorts(row.ctypes.data, row_terms, of, n)


def _unpacker(kind: int, centred: int) -> BlockCode:
    """The function that unpacks blocks of one type to a row of ROW_WORDS."""

    def unpack(dst, src, n_blocks):
        few_bits(kind, centred, dst, src, n_blocks)

    return block_code(unpack)


KINDS = [
    name for name in INTEGER_TYPES * (CHOSEN.byte_pairs and CHOSEN.lanes == 8)
    if centre(name)[1] and not (name in MINIMA_TYPES and columns_of(name) < GROUP)
]  # fmt: skip
# As they are multiplied forward where 32 have one scale, and as they are elsewhere.
_UNPACK = {
    (name, centred): _unpacker(INTEGER_TYPES.index(name), int(centred))
    for name in KINDS for centred in (False, True)
}  # fmt: skip

# -- forward --------------------------------------------------------------------------------------


class FewBitsForward(FewBitsProduct):
    @kernel
    def meet(f, thread, group, column, k0, k, c, ldc, adds):
        a, a_terms = _group(f.packed_a, f.k, group, k0, _X, _X_TERMS)
        b = f.panels[thread, column // PANEL * _ROW_STEP :].ctypes.data
        product_of_rows(a.ctypes.data, a_terms.ctypes.data, b, b + _ROW_PANEL * 4, c, ldc,
                        k // GROUP, f.together, adds)  # fmt: skip


@panels_code(FewBitsForward)
def _row_panels(f, thread, first, n_rows, k0, k):
    """PANEL rows of W at a time are unpacked and transposed."""
    w, rows = columns_from(rows_from(f.w, first), k0), f.rows[thread]
    n_scales, step, of = GROUP // f.one_scale, TERMS // 2 * PANEL, rows.ctypes.data
    for i in range(0, n_rows, PANEL):
        unpack_rows(rows, ROW_WORDS, w, i, n_rows, k, PANEL)
        panel = f.panels[thread, i // PANEL * _ROW_STEP :]
        terms = panel[_ROW_PANEL:]
        transpose_words(panel.ctypes.data, PANEL, of + _BYTES_AT * 4, ROW_WORDS, k // 4)
        to = terms[(n_scales - 1) * PANEL :].ctypes.data
        transpose_words(to, step, of, ROW_WORDS, k // f.one_scale)
        if n_scales == 2:
            put_two_terms(terms.ctypes.data, panel.ctypes.data, k // GROUP)
            continue
        transpose_words(to + PANEL * 4, step, of + SCALES * 4, ROW_WORDS, k // f.one_scale)
        if f.moved != 0:
            put_terms(terms.ctypes.data, k // GROUP, f.moved)


# -- backward -------------------------------------------------------------------------------------


class FewBitsBackward(FewBitsProduct):
    @kernel
    def meet(f, thread, group, column, k0, k, c, ldc, adds):
        dy, units = _group(f.packed_a, f.k, group, k0, _DY, _DY_TERMS)
        scaled, n = f.scaled[thread], k // GROUP
        a, scales = scaled.ctypes.data, scaled[_SCALED:].ctypes.data
        sums = scaled[_SCALED + BLOCKS * LANES :].ctypes.data
        if column % f.one_scale == 0:
            of = f.factors[thread, column // f.one_scale * BLOCKS * FACTOR_WORDS :]
            scale_rows(a, scales, sums, dy.ctypes.data, units.ctypes.data, of.ctypes.data, n,
                       f.has_minima)  # fmt: skip
        b = f.panels[thread, column // PANEL * _COLUMN_STEP :].ctypes.data
        product_of_columns(a, scales, sums, b, b + _COLUMN_PANEL * 4, c, ldc, n, f.together, adds)


@panels_code(FewBitsBackward)
def _column_panels(f, thread, first, n_columns, k0, k):
    """Panels, starts and factors, of GROUP rows of W at a time."""
    w, rows, panels = rows_from(columns_from(f.w, first), k0), f.rows[thread], f.panels[thread]
    terms, n = rows[GROUP * ROW_WORDS :], n_columns // f.one_scale  # (scales, minima; GROUP)
    for i in range(0, k, GROUP):
        block = i // GROUP
        unpack_rows(rows, ROW_WORDS, w, i, k, n_columns, GROUP)
        to = panels[block * BLOCK_WORDS * PANEL :]
        starts = panels[_COLUMN_PANEL + block * PANEL :]
        put_columns(to.ctypes.data, starts.ctypes.data, _COLUMN_STEP,
                    rows[_BYTES_AT:].ctypes.data, ROW_WORDS, n_columns // PANEL)  # fmt: skip
        for at in range(0, 2 * SCALES, SCALES):  # of the scales, of the minima
            for j in range(0, GROUP, LANES):
                of, to = rows[j * ROW_WORDS + at :], terms[at * GROUP + j :]
                transpose_words(to.ctypes.data, GROUP, of.ctypes.data, ROW_WORDS, n)
        for g in range(n):
            to = f.factors[thread, (g * BLOCKS + block) * FACTOR_WORDS :]
            scales, minima = terms[g * GROUP :], terms[(SCALES + g) * GROUP :]
            put_factors(to.ctypes.data, scales.ctypes.data, minima.ctypes.data, f.moved)


# -- the path -------------------------------------------------------------------------------------


def takes(p: Problem) -> bool:
    """Whether it is a product with such weights, of whole blocks of its sum."""
    if p.compute != "int8" or p.form == "strided" or p.weight_type.name not in KINDS:
        return False
    return p.row % max(p.weight_type.block, GROUP) == 0 and p.k % GROUP == 0


def _layout(p: Problem) -> Layout:
    forward, n_groups = p.form == "mul_mat", round_up(p.m, MR) // MR
    columns, step = (FORWARD_COLUMNS, _ROW_STEP) if forward else (BACKWARD_COLUMNS, _COLUMN_STEP)
    block = _X + _X_TERMS if forward else _DY + _DY_TERMS
    own = BACKWARD_COLUMNS // columns_of(p.weight_type.name) * (not forward)
    return Layout(
        packed_a=Array((n_groups * (p.k // GROUP) * block,)),
        rows=per_thread(PANEL * ROW_WORDS if forward else GROUP * (ROW_WORDS + 2 * SCALES)),
        panels=per_thread(columns // PANEL * step),
        factors=per_thread(own * BLOCKS * FACTOR_WORDS),
        scaled=per_thread(0 if forward else _SCALED + (BLOCKS + 1) * LANES),
        edge=per_thread(MR * PANEL),
        **scratch_of(p, columns),
    )


def _bind(p: Problem, o: Operands, **scratch: np.ndarray) -> Call:
    name, forward = p.weight_type.name, p.form == "mul_mat"
    two = columns_of(name) < GROUP
    centred = two or not forward
    w, moved = block_matrix(o.b, p.weight_type, _UNPACK[name, centred].address), move(name, centred)
    kind, unpack, depth = (
        (FewBitsForward, _row_panels, FORWARD_DEPTH) if forward
        else (FewBitsBackward, _column_panels, BACKWARD_DEPTH)
    )  # fmt: skip
    return tiled_call(
        kind, _pack_task, unpack, p, o, w, BYTE_TILE, scratch, depth=depth,
        one_scale=columns_of(name), together=2 if two and forward else centre(name)[1],
        moved=moved, has_minima=moved != 0 or name in MINIMA_TYPES,
    )  # fmt: skip


FEW_BITS = ProductPath(
    name="int8, few bits", takes=lambda p: takes(p) and columns_of(p.weight_type.name) == GROUP,
    layout=_layout, bind=_bind, shares=True, joins=True,
)  # fmt: skip
# A packed x is moved: no path of the other types shares it.
TWO_SCALES = replace(FEW_BITS, name="int8, few bits, two scales", takes=takes)
