"""Products with a quantised weight in integers: both operands as bytes, in blocks of 32 numbers.

Forward, packing rounds x to bytes with one scale for 32 numbers (pyggml.kernels.gemm.activations).
This is the whole error: NMSE 3e-5 for normal numbers; 4e-5 for Q6_K, whose groups of 16 weights
share a scale in pairs. Backward, a sum runs over rows of W, whose scales differ. So 32 weights of a
column are rounded to bytes anew, as dy is: 6e-5. Tasks are cut as in pyggml.kernels.gemm.product.

Packed x holds for each group of MR rows, of B = K / 32 blocks: words (8 B, MR) of four bytes (where
the CPU multiplies matrices, pairs of words (4 B, MR, 2), and so panels), then
terms (B, 3, MR): scales, starts, totals. Packed W is panels (WORDS, PANEL) of bytes, and panels
(2 · BLOCKS, PANEL) of terms: scales, minima.
"""

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import BlockCode, block_code, kernel
from pyggml.jit.frames import Bool, Floats2
from pyggml.jit.scratch import Array, Layout, per_thread
from pyggml.jit.simd import fill
from pyggml.jit.tasks import task_code
from pyggml.kernels.gemm.activations import BLOCK_WORDS, quantize
from pyggml.kernels.gemm.beside import scratch_of
from pyggml.kernels.gemm.dots import step
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
from pyggml.kernels.gemm.int8_tile import (
    BACKWARD_DEPTH,
    BLOCKS,
    FORWARD_DEPTH,
    KINDS,
    LANES,
    MR,
    PANEL,
    ROW_WORDS,
    WORDS,
    byte_product,
    quantize_columns,
    unpack_bytes,
)
from pyggml.kernels.gemm.panels import interleave_rows, transpose_words
from pyggml.kernels.gemm.path import Operands, Problem, ProductPath
from pyggml.kernels.gemm.row_plan import unsigned_range
from pyggml.kernels.gemm.tile import BYTE_TILE
from pyggml.quants.layout import GROUP
from pyggml.quants.unpack import MINIMA_TYPES, UNPACK
from pyggml.sizes import round_up

_TOGETHER = 2 if BYTE_TILE.square else 1  # words of a column that are neighbours
A_TERMS = 3  # of a block of x: scale, start, total


class Int8Product(TiledProduct):
    """A product of bytes. B's blocks have scales, and may have minima."""

    has_minima: Bool
    terms: Floats2  # of each thread: panels of scales and of minima

    @kernel
    def meet(f, thread, group, column, k0, k, c, ldc, adds):
        numbers, a_terms = _group(f.packed_a, f.k, group)
        a, of_a = numbers[k0 // 4 * MR :], a_terms[k0 // GROUP * A_TERMS * MR :]
        b, of_b = f.panels[thread, column * WORDS :], f.terms[thread, column * 2 * BLOCKS :]
        byte_product(a.ctypes.data, of_a.ctypes.data, b.ctypes.data, of_b.ctypes.data, c, ldc,
                     k // GROUP, f.has_minima, adds)  # fmt: skip


# -- packing x ----------------------------------------------------------------------------------


@kernel
def _group(packed, depth, group):
    """The bytes (words, MR) of a group of rows, and its terms (B, 3, MR)."""
    n_bytes, n_terms = depth // GROUP * MR * BLOCK_WORDS, depth // GROUP * MR * A_TERMS
    mine = packed[group * (n_bytes + n_terms) :]
    return mine[:n_bytes], mine[n_bytes : n_bytes + n_terms]


@kernel
def _in_words(to, rows, n):
    """to (n, MR) from MR rows of n words, WORDS apart."""
    interleave_rows(to, rows, WORDS, n, MR)


@kernel
def _in_pairs(to, rows, n):
    """The same with words in pairs: (n / 2, MR, 2)."""
    pairs, of = to.view(np.uint64), rows.view(np.uint64)
    for i in range(MR):
        for k in range(n // 2):
            pairs[k * MR + i] = of[i * (WORDS // 2) + k]


_interleave = _in_pairs if BYTE_TILE.square else _in_words


@task_code(Int8Product)
def _pack_task(f, task, thread):
    """Pack one group of A's rows."""
    a, rows = f.a, f.rows[thread]
    numbers, terms = _group(f.packed_a, f.k, task)
    if (task + 1) * MR > f.m:
        fill(rows, np.float32(0))
        fill(terms, np.float32(0))
    for k0 in range(0, f.k, FORWARD_DEPTH):
        n = min(FORWARD_DEPTH, f.k - k0) // GROUP
        terms_here = terms[k0 // GROUP * A_TERMS * MR :]
        for i in range(min(MR, f.m - task * MR)):
            row, of = rows[i * WORDS :], a[(task * MR + i) * f.lda + k0 :].ctypes.data
            ahead = of + 4 * f.lda  # the next row's, which are prefetched
            quantize(row.ctypes.data, terms_here[i:].ctypes.data, MR, of, n, ahead)
        _interleave(numbers[k0 // 4 * MR :], rows, n * BLOCK_WORDS)


# -- panels of W ----------------------------------------------------------------------------------


def _unpacker(kind: int) -> BlockCode:
    """The function that unpacks blocks of one type to a row of ROW_WORDS."""

    def unpack(dst, src, n_blocks):
        unpack_bytes(kind, dst, src, n_blocks)

    return block_code(unpack)


_BYTES = {name: _unpacker(i) for i, name in enumerate(KINDS)}


@kernel
def _columns_of_words(panel, column, rows, n):
    """LANES columns of a panel from `column` on: n words of as many rows, ROW_WORDS apart."""
    to = panel.ctypes.data + column * 4
    transpose_words(to, PANEL, rows.ctypes.data, ROW_WORDS, n)


@kernel
def _columns_of_pairs(panel, column, rows, n):
    """The same with words in pairs: (n / 2, PANEL, 2)."""
    pairs, of = panel.view(np.uint64), rows.view(np.uint64)
    for i in range(LANES):
        for j in range(n // 2):
            pairs[j * PANEL + column + i] = of[i * (ROW_WORDS // 2) + j]


_put_columns = _columns_of_pairs if BYTE_TILE.square else _columns_of_words


@panels_code(Int8Product)
def _row_panels(f, thread, first, n_rows, k0, k):
    """LANES rows of W at a time are unpacked and transposed."""
    w, rows, terms = columns_from(rows_from(f.w, first), k0), f.rows[thread], f.terms[thread]
    for i in range(0, n_rows, LANES):
        unpack_rows(rows, ROW_WORDS, w, i, n_rows, k, LANES)
        panel, column = i // PANEL, i % PANEL
        _put_columns(f.panels[thread][panel * WORDS * PANEL :], column, rows, k // 4)
        to = terms.ctypes.data + (panel * 2 * BLOCKS * PANEL + column) * 4
        transpose_words(to, PANEL, rows.ctypes.data + WORDS * 4, ROW_WORDS, 2 * BLOCKS)


# -- backward: dx[T, K] (+)= dy[T, N] · W[N, K], summed over rows of W ----------------------------


@panels_code(Int8Product)
def _column_panels(f, thread, first, n_columns, k0, k):
    """GROUP rows of W at a time are unpacked, and rounded anew."""
    w, rows = rows_from(columns_from(f.w, first), k0), f.rows[thread]
    for i in range(0, k, GROUP):
        unpack_rows(rows, BACKWARD_COLUMNS, w, i, k, n_columns, GROUP)
        for column in range(0, n_columns, LANES):
            panel, j = column // PANEL * PANEL, column % PANEL
            to = f.panels[thread, panel * WORDS + i // 4 * PANEL + j * _TOGETHER :]
            scales = f.terms[thread, panel * 2 * BLOCKS + i // GROUP * PANEL + j :]
            of = rows[column:].ctypes.data
            quantize_columns(to.ctypes.data, scales.ctypes.data, of, BACKWARD_COLUMNS)


# -- the path -------------------------------------------------------------------------------------


def takes(p: Problem) -> bool:
    """Whether a product with a weight can be one of integers.

    W's rows must hold whole blocks. Backward, which sums over rows, needs whole blocks of them too.
    """
    if p.compute != "int8" or p.form == "strided" or p.weight_type.name not in KINDS:
        return False
    return p.row % step(p.weight_type) == 0 and p.k % GROUP == 0


def _layout(p: Problem) -> Layout:
    packed = round_up(p.m, MR) * (p.k // GROUP) * (BLOCK_WORDS + A_TERMS)
    to_pack, to_unpack = BYTE_TILE.padded_mr * WORDS, LANES * ROW_WORDS
    n_columns = max(FORWARD_COLUMNS, BACKWARD_COLUMNS)
    return Layout(
        packed_a=Array((packed,)),
        rows=per_thread(max(to_pack, to_unpack, GROUP * BACKWARD_COLUMNS)),
        panels=per_thread(n_columns * WORDS),
        terms=per_thread(n_columns * 2 * BLOCKS),
        edge=per_thread(MR * PANEL),
        **scratch_of(p, n_columns),
    )


def _bind(p: Problem, o: Operands, **scratch: np.ndarray) -> Call:
    name, forward = p.weight_type.name, p.form == "mul_mat"
    w = block_matrix(o.b, p.weight_type, (_BYTES if forward else UNPACK)[name].address)
    has_minima = forward and name in MINIMA_TYPES
    unpack, depth = (_row_panels, FORWARD_DEPTH) if forward else (_column_panels, BACKWARD_DEPTH)
    return tiled_call(
        Int8Product, _pack_task, unpack, p, o, w, BYTE_TILE, scratch, depth=depth,
        has_minima=has_minima,
    )  # fmt: skip


def rounds_no_weights(p: Problem) -> bool:
    """Whether it takes a product without rounding weights anew: forward, one scale for 32."""
    return p.form == "mul_mat" and takes(p) and unsigned_range(p.weight_type.name) is not None


INT8 = ProductPath(name="int8", takes=takes, layout=_layout, bind=_bind, shares=True, joins=True)
