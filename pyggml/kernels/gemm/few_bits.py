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
from pyggml.kernels.gemm.beside import begin, finish, scratch_of, take_columns
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
    Tasks,
    TiledProduct,
    block_matrix,
    columns_from,
    rows_from,
    rows_of_groups,
    share_of,
    tiled_call,
    unpack_row,
)
from pyggml.kernels.gemm.panels import add_edge, transpose
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
def _group(packed, depth, group, size, n_terms):
    """The numbers of a group of rows, `size` words a block, and its terms."""
    n = depth // GROUP
    mine = packed[group * n * (size + n_terms) :]
    return mine[: n * size], mine[n * size : n * (size + n_terms)]


@kernel
def _clear(numbers, size, step, n):
    """`size` words of each of n blocks = 0."""
    for block in range(n):
        fill(numbers[block * step : block * step + size], np.float32(0))


@task_code(FewBitsProduct)
def _pack_task(f, task, thread):
    """Pack one group of A's rows."""
    n, forward = f.k // GROUP, f.factors.shape[1] == 0
    size, n_terms = (_X, _X_TERMS) if forward else (_DY, _DY_TERMS)
    numbers, terms = _group(f.packed_a, f.k, task, size, n_terms)
    fill(terms, np.float32(0))
    for i in range(MR):
        row, row_terms = numbers[i * (size // MR) :], terms[i:].ctypes.data
        if task * MR + i >= f.m:
            _clear(row, size // MR, size, n)
            continue
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


@kernel
def _unpack_rows(f, thread, weight, n_rows, k):
    """Panels of k numbers of n_rows rows of W: PANEL rows at a time, transposed."""
    rows, n_scales = f.rows[thread], GROUP // f.one_scale
    step, of = TERMS // 2 * PANEL, rows.ctypes.data
    for first in range(0, n_rows, PANEL):
        for i in range(PANEL):
            row = rows[i * ROW_WORDS : (i + 1) * ROW_WORDS]
            if first + i < n_rows:
                unpack_row(row.ctypes.data, weight, first + i, k, PANEL)
            else:
                fill(row, np.float32(0))
        panel = f.panels[thread][first // PANEL * _ROW_STEP :]
        terms = panel[_ROW_PANEL:]
        for j in range(0, k // 4, LANES):
            transpose(panel[j * PANEL :].ctypes.data, PANEL, of + (_BYTES_AT + j) * 4, ROW_WORDS)
        for j in range(0, k // f.one_scale, LANES):
            here = terms[j * step + (n_scales - 1) * PANEL :]
            transpose(here.ctypes.data, step, of + j * 4, ROW_WORDS)
            if n_scales == 1:
                minima = of + (SCALES + j) * 4
                transpose(here[PANEL:].ctypes.data, step, minima, ROW_WORDS)
        if n_scales == 2:
            put_two_terms(terms.ctypes.data, panel.ctypes.data, k // GROUP)
        elif f.moved != 0:
            put_terms(terms.ctypes.data, k // GROUP, f.moved)


@kernel
def _multiply_rows(f, thread, first, n_columns, groups, k0, k):
    """C[:, first : first + n_columns] (+)= A[:, k0 : k0 + k] · the thread's panels."""
    columns = first, first + n_columns
    if k0 == 0:
        take_columns(f, thread, columns)
        begin(f, thread, rows_of_groups(f, groups), columns)
    c, edge, added = f.c, f.edge[thread], f.accumulate or f.begins or k0 > 0
    panels = f.panels[thread].ctypes.data
    for g in range(groups[0], groups[1]):
        numbers, terms = _group(f.packed_a, f.k, g, _X, _X_TERMS)
        a = numbers[k0 // GROUP * _X :].ctypes.data
        a_terms = terms[k0 // GROUP * _X_TERMS :].ctypes.data
        n_rows = min(MR, f.m - g * MR)
        for column in range(0, n_columns, PANEL):
            b = panels + column // PANEL * _ROW_STEP * 4
            start, n = g * MR * f.n + first + column, min(PANEL, n_columns - column)
            inside = n_rows == MR and n == PANEL
            to, ldc = (c.ctypes.data + start * 4, f.n) if inside else (edge.ctypes.data, PANEL)
            product_of_rows(a, a_terms, b, b + _ROW_PANEL * 4, to, ldc, k // GROUP, f.together,
                            inside and added)  # fmt: skip
            if not inside:
                add_edge(c, start, f.n, edge, PANEL, n_rows, n, added)
        if k0 + k == f.k:  # while these rows of C are in the first cache
            finish(f, thread, rows_of_groups(f, (g, g + 1)), columns)


@task_code(FewBitsProduct)
def _forward_task(f, task, thread):
    first, n_rows, groups = share_of(f, task)
    here = rows_from(f.w, first)
    for k0 in range(0, f.k, FORWARD_DEPTH):
        k = min(FORWARD_DEPTH, f.k - k0)
        _unpack_rows(f, thread, columns_from(here, k0), n_rows, k)
        _multiply_rows(f, thread, first, n_rows, groups, k0, k)


# -- backward -------------------------------------------------------------------------------------


@kernel
def _unpack_columns(f, thread, weight, n_rows, n_columns):
    """Panels, starts and factors of n_columns numbers of n_rows rows of W."""
    rows, panels, factors = f.rows[thread], f.panels[thread], f.factors[thread]
    terms = rows[GROUP * ROW_WORDS :]  # (scales, then minima; GROUP)
    for first in range(0, n_rows, GROUP):
        block = first // GROUP
        for i in range(GROUP):
            unpack_row(rows[i * ROW_WORDS :].ctypes.data, weight, first + i, n_columns, GROUP)
        to, starts = panels[block * BLOCK_WORDS * PANEL :], panels[_COLUMN_PANEL + block * PANEL :]
        put_columns(to.ctypes.data, starts.ctypes.data, _COLUMN_STEP, rows[_BYTES_AT:].ctypes.data,
                    ROW_WORDS, n_columns // PANEL)  # fmt: skip
        n = n_columns // f.one_scale
        for which in range(2):
            for j in range(which * SCALES, which * SCALES + n, LANES):
                for i in range(0, GROUP, LANES):
                    of = rows[i * ROW_WORDS + j :].ctypes.data
                    transpose(terms[j * GROUP + i :].ctypes.data, GROUP, of, ROW_WORDS)
        for g in range(n):
            to = factors[(g * BLOCKS + block) * FACTOR_WORDS :].ctypes.data
            minima = terms[(SCALES + g) * GROUP :].ctypes.data
            put_factors(to, terms[g * GROUP :].ctypes.data, minima, f.moved)


@kernel
def _multiply_columns(f, thread, first, n_columns, groups, k0, k):
    """C[:, first : first + n_columns] (+)= dy[:, k0 : k0 + k] · the thread's panels."""
    columns, n = (first, first + n_columns), k // GROUP
    if k0 == 0:
        take_columns(f, thread, columns)
        begin(f, thread, rows_of_groups(f, groups), columns)
    c, edge, added = f.c, f.edge[thread], f.accumulate or f.begins or k0 > 0
    scaled, panels = f.scaled[thread], f.panels[thread].ctypes.data
    a, scales = scaled.ctypes.data, scaled[_SCALED:].ctypes.data
    sums = scaled[_SCALED + BLOCKS * LANES :].ctypes.data
    for g in range(groups[0], groups[1]):
        numbers, units = _group(f.packed_a, f.k, g, _DY, _DY_TERMS)
        dy = numbers[k0 // GROUP * _DY :].ctypes.data
        units_at = units[k0 // GROUP * _DY_TERMS :].ctypes.data
        n_rows = min(MR, f.m - g * MR)
        for column in range(0, n_columns, PANEL):
            if column % f.one_scale == 0:
                of = column // f.one_scale * BLOCKS * FACTOR_WORDS
                factors = f.factors[thread][of:].ctypes.data
                scale_rows(a, scales, sums, dy, units_at, factors, n, f.has_minima)
            b = panels + column // PANEL * _COLUMN_STEP * 4
            start, inside = g * MR * f.n + first + column, n_rows == MR
            to, ldc = (c.ctypes.data + start * 4, f.n) if inside else (edge.ctypes.data, PANEL)
            product_of_columns(a, scales, sums, b, b + _COLUMN_PANEL * 4, to, ldc, n, f.together,
                               inside and added)  # fmt: skip
            if not inside:
                add_edge(c, start, f.n, edge, PANEL, n_rows, PANEL, added)
        if k0 + k == f.k:  # while these rows of C are in the first cache
            finish(f, thread, rows_of_groups(f, (g, g + 1)), columns)


@task_code(FewBitsProduct)
def _backward_task(f, task, thread):
    first, n_columns, groups = share_of(f, task)
    here = columns_from(f.w, first)
    for k0 in range(0, f.k, BACKWARD_DEPTH):
        k = min(BACKWARD_DEPTH, f.k - k0)
        _unpack_columns(f, thread, rows_from(here, k0), k, n_columns)
        _multiply_columns(f, thread, first, n_columns, groups, k0, k)


# -- the path -------------------------------------------------------------------------------------

_TASKS = Tasks(_pack_task, _forward_task, _backward_task)


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
    return tiled_call(
        _TASKS, FewBitsProduct, p, o, w, BYTE_TILE, scratch, one_scale=columns_of(name),
        together=2 if two and forward else centre(name)[1], moved=moved,
        has_minima=moved != 0 or name in MINIMA_TYPES,
    )  # fmt: skip


FEW_BITS = ProductPath(
    name="int8, few bits", takes=lambda p: takes(p) and columns_of(p.weight_type.name) == GROUP,
    layout=_layout, bind=_bind, shares=True, joins=True,
)  # fmt: skip
# A packed x is moved: no path of the other types shares it.
TWO_SCALES = replace(FEW_BITS, name="int8, few bits, two scales", takes=takes)
