"""Products with a weight in panels that fit the caches. T tokens, N rows of W, K numbers in each.

forward    y[T, N]  (+)= x[T, K] · W[N, K]ᵀ   W in any weight type
backward   dx[T, K] (+)= dy[T, N] · W[N, K]   the same W read the same way, never transposed whole

The operand that the microkernel broadcasts (x, dy) is packed once. A task unpacks some columns of W
or Wᵀ to panels, a part of their depth at a time, and multiplies its share of the tokens with them.
The order of every sum depends on the shapes only, so that threads do not change it. For a tile of
pairs, packing rounds both operands to bfloat16.
"""

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import kernel
from pyggml.jit.scratch import Array, Layout, per_thread
from pyggml.jit.simd import fill
from pyggml.jit.tasks import task_code
from pyggml.kernels.gemm.beside import finish, scratch_of
from pyggml.kernels.gemm.frames import (
    BACKWARD_COLUMNS,
    FORWARD_COLUMNS,
    TiledProduct,
    block_matrix,
    columns_from,
    panels_code,
    rows_from,
    rows_of_groups,
    tiled_call,
    unpack_row,
)
from pyggml.kernels.gemm.microkernel import fetch
from pyggml.kernels.gemm.panels import (
    LANES,
    PACKED_GROUPS,
    PAIR_NUMBERS,
    PIECE,
    PackedPart,
    View,
    Window,
    multiply_panels,
    pack_group,
    pack_pairs,
    packing_scratch,
    pair_two,
    round_row,
    round_two,
    transpose_rounded,
    transpose_words,
    words_of,
)
from pyggml.kernels.gemm.path import Operands, Problem, ProductPath
from pyggml.kernels.gemm.tile import FLOAT_TILE, PAIR_TILE, Tile
from pyggml.quants.unpack import UNPACK

# Words of k forward, or numbers backward, in one pass over B, whose panels then stay in the second
# cache. Forward it is a multiple of every block of weights, backward of a vector of pairs. A pass
# reads and writes C: 512 rows with a BF16 matrix of 3072 × 1024 make 876 GFLOP/s backward in passes
# of 512 and 671 in those of 128, on two cores of a Zen 5; 2048 rows with one of 1024 × 384 take
# 1.69 ms in passes of 1024 and 2.01 in those of 512.
FORWARD_DEPTH, BACKWARD_DEPTH, PAIRS_DEPTH = 256, 128, 1024
_AHEAD = 16
PAIRING = 48  # rows of A that take as long as a task's panels of bfloat16
_PANEL = FLOAT_TILE.panel


@task_code(TiledProduct)
def _pack_task(f, task, thread):
    """Pack one group of A's rows."""
    view = View(0, 1, f.lda) if f.a_in_columns else View(0, f.lda, 1)
    pack_group(f.packed_a, f.a, view, f.m, f.k, task, f.tile)


@task_code(TiledProduct)
def _pack_pairs_task(f, task, thread):
    """Pack a piece of several groups of A's rows as pairs."""
    n_pieces = (f.k + PIECE - 1) // PIECE
    first, k0 = task // n_pieces * PACKED_GROUPS * f.tile.mr, task % n_pieces * PIECE
    rows = f.rows[thread]
    kind = f.a_in_columns, f.a_is_narrow
    pack_pairs(f.packed_a, f.a, f.lda, kind, f.m, f.k, first, k0, rows, f.tile)


class FloatProduct(TiledProduct):
    """A product of floats, or of pairs."""

    @kernel
    def multiply(f, thread, columns, groups, k0, k, adds):
        """A panel meets all groups before the next one."""
        tile, n_words = f.tile, words_of(f.tile, k)
        part = PackedPart(words_of(tile, f.k), k0 // tile.per_word, n_words, groups[0], groups[1])
        window = Window(columns[0], f.n, f.m, columns[1] - columns[0])
        panels, edge = f.panels[thread], f.edge[thread]
        multiply_panels(tile, f.packed_a, part, panels, edge, f.c, window, adds)
        if k0 + k == f.k:
            finish(f, thread, rows_of_groups(f, groups), columns)


# -- forward ------------------------------------------------------------------------------------


@kernel
def _unpack_rows(panels, rows, weight, n_rows, k, tile, w_bytes):
    """Panels (words, panel) of k numbers of n_rows rows of W.

    LANES rows at a time are unpacked and transposed; rows of bfloat16 are pairs already, and those
    of float32 are rounded on the way. w_bytes: of a number of either, else 0
    """
    n, ld = words_of(tile, k), FORWARD_DEPTH
    numbers = rows[LANES * ld :]  # pairs need half of `rows`
    lie_so = w_bytes > 0 and tile.per_word == 2 and k == 2 * n and weight.row_bytes % 4 == 0
    for first in range(0, n_rows, LANES):
        to = panels.ctypes.data + (first // tile.panel * tile.panel * n + first % tile.panel) * 4
        if lie_so and first + LANES <= n_rows:
            of, step = weight.address + first * weight.row_bytes, weight.row_bytes // 4
            if w_bytes == 2:
                transpose_words(to, tile.panel, of, step, n)
            for j in range(0, n if w_bytes == 4 else 0, LANES):
                transpose_rounded(to + j * tile.panel * 4, tile.panel, of + j * 8, step)
            continue
        for i in range(LANES):
            row = rows[i * ld : i * ld + n]
            if first + i >= n_rows:
                fill(row, np.float32(0))
            elif tile.per_word == 2:
                unpack_row(numbers.ctypes.data, weight, first + i, k, LANES)
                fill(numbers[k : 2 * n], np.float32(0))
                round_row(row.ctypes.data, numbers.ctypes.data, 2 * n)
            else:
                unpack_row(row.ctypes.data, weight, first + i, k, LANES)
        transpose_words(to, tile.panel, rows.ctypes.data, ld, n)


@panels_code(FloatProduct)
def _row_panels(f, thread, first, n_rows, k0, k):
    w = columns_from(rows_from(f.w, first), k0)
    _unpack_rows(f.panels[thread], f.rows[thread], w, n_rows, k, f.tile, f.w_bytes)


# -- backward -----------------------------------------------------------------------------------


@kernel
def _unpack_columns(panels, rows, weight, n_rows, n_columns, tile, w_bytes):
    """Panels (words, panel) of n_columns numbers of n_rows rows of W; two rows make pairs."""
    n, whole = words_of(tile, n_rows), n_columns // tile.panel * tile.panel if w_bytes > 0 else 0
    for i in range(n):
        if tile.per_word == 1:
            unpack_row(rows.ctypes.data, weight, i, n_columns, PAIR_NUMBERS)
            _spread_row(panels, rows, i, n, n_columns)
            continue
        done = whole if 2 * i + 1 < n_rows else 0
        _pair_rows(panels, weight, i, n, done, tile, w_bytes)
        for j in range(2 if done < n_columns else 0):
            row = rows[j * BACKWARD_COLUMNS : j * BACKWARD_COLUMNS + n_columns]
            if 2 * i + j < n_rows:
                unpack_row(row.ctypes.data, weight, 2 * i + j, n_columns, PAIR_NUMBERS)
            else:
                fill(row, np.float32(0))
        for column in range(done, n_columns, tile.panel):
            to = panels.ctypes.data + (column * n + i * tile.panel) * 4
            of = rows.ctypes.data + column * 4
            round_two(to, of, of + BACKWARD_COLUMNS * 4, tile.panel)


@kernel
def _pair_rows(panels, weight, i, n, n_columns, tile, w_bytes):
    """Row i of the panels (n, panel) = pairs of two rows of bfloat16, or rounded to it."""
    of = weight.address + 2 * i * weight.row_bytes
    fetch(of + _AHEAD * weight.row_bytes, w_bytes * n_columns)
    fetch(of + (_AHEAD + 1) * weight.row_bytes, w_bytes * n_columns)
    for column in range(0, n_columns, tile.panel):
        to, a = panels.ctypes.data + (column * n + i * tile.panel) * 4, of + w_bytes * column
        if w_bytes == 2:
            pair_two(to, a, a + weight.row_bytes, tile.panel)
        else:
            round_two(to, a, a + weight.row_bytes, tile.panel)


@kernel
def _spread_row(panels, row, i, n, n_columns):
    """Write a row of numbers to row i of the panels (n, panel)."""
    for column in range(0, n_columns, _PANEL):
        to = panels[column * n + i * _PANEL :][:_PANEL]
        of = row[column:][:_PANEL]
        for j in range(_PANEL):
            to[j] = of[j]


@panels_code(FloatProduct)
def _column_panels(f, thread, first, n_columns, k0, k):
    w = rows_from(columns_from(f.w, first), k0)
    _unpack_columns(f.panels[thread], f.rows[thread], w, k, n_columns, f.tile, f.w_bytes)


# -- the paths ----------------------------------------------------------------------------------


def _tile(p: Problem) -> Tile:
    return PAIR_TILE if p.rounds else FLOAT_TILE


def _bind(p: Problem, o: Operands, **scratch: np.ndarray) -> Call:
    w = block_matrix(o.b, p.weight_type, UNPACK[p.weight_type.name].address)
    tile, pack, costs = _tile(p), _pack_task, {}
    if p.rounds:
        n_packs = -(-p.m // (PACKED_GROUPS * tile.mr)) * -(-p.k // PIECE)
        pack, costs = _pack_pairs_task, {"n_packs": n_packs, "unpacking": PAIRING}
    unpack, depth = (_row_panels, FORWARD_DEPTH * tile.per_word) if p.form == "mul_mat" else (
        _column_panels, PAIRS_DEPTH if p.rounds else BACKWARD_DEPTH
    )  # fmt: skip
    return tiled_call(FloatProduct, pack, unpack, p, o, w, tile, scratch, depth=depth, **costs)


def _panel_words(tile: Tile) -> int:
    """Words of a thread's panels, forward and backward."""
    backward = PAIRS_DEPTH // 2 if tile.per_word == 2 else BACKWARD_DEPTH
    return max(FORWARD_DEPTH * FORWARD_COLUMNS, backward * BACKWARD_COLUMNS)


def _layout(p: Problem) -> Layout:
    tile = _tile(p)
    return Layout(
        packed_a=Array((tile.packed_words(p.m, p.k),)),
        rows=per_thread(
            max(packing_scratch(tile), (LANES + 2) * FORWARD_DEPTH, 2 * BACKWARD_COLUMNS)
        ),
        panels=per_thread(_panel_words(tile)),
        edge=per_thread(tile.mr * tile.panel),
        **scratch_of(p, FORWARD_COLUMNS if p.form == "mul_mat" else BACKWARD_COLUMNS),
    )


BF16 = ProductPath(
    name="bf16", takes=lambda p: p.rounds, layout=_layout, bind=_bind, shares=True, joins=True,
    narrow=True,
)  # fmt: skip
F32 = ProductPath(
    name="f32", takes=lambda p: True, layout=_layout, bind=_bind, shares=True, joins=True
)  # fmt: skip
