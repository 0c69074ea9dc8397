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
from pyggml.kernels.gemm.beside import begin, finish, scratch_of, take_columns
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
from pyggml.kernels.gemm.panels import (
    LANES,
    PAIR_NUMBERS,
    PIECE_WORDS,
    PackedPart,
    View,
    Window,
    multiply_panels,
    pack_group,
    pack_pairs_group,
    round_row,
    round_two,
    transpose,
    words_of,
)
from pyggml.kernels.gemm.path import Operands, Problem, ProductPath
from pyggml.kernels.gemm.tile import FLOAT_TILE, PAIR_TILE, Tile
from pyggml.quants.unpack import UNPACK

# Numbers of k in one pass over B, whose panels then stay in the second cache. Forward it is a
# multiple of every block of weights, backward of a vector of pairs.
FORWARD_DEPTH, BACKWARD_DEPTH = 256, 128
_PANEL = FLOAT_TILE.panel


@task_code(TiledProduct)
def _pack_task(f, task, thread):
    """Pack one group of A's rows."""
    if f.tile.per_word == 2:
        pack_pairs_group(f.packed_a, f.a, f.lda, f.m, f.k, task, f.rows[thread], f.tile)
    else:
        pack_group(f.packed_a, f.a, View(0, f.lda, 1), f.m, f.k, task, f.tile)


@kernel
def _multiply(f, thread, first, n_columns, groups, k0, k):
    """C[:, first : first + n_columns] (+)= A[:, k0 : k0 + k] · the thread's panels."""
    tile, rows, columns = f.tile, rows_of_groups(f, groups), (first, first + n_columns)
    if k0 == 0:
        take_columns(f, thread, columns)
        begin(f, thread, rows, columns)
    part = PackedPart(
        words_of(tile, f.k), k0 // tile.per_word, words_of(tile, k), groups[0], groups[1]
    )
    window = Window(first, f.n, f.m, n_columns)
    added = f.accumulate or f.begins or k0 > 0
    multiply_panels(tile, f.packed_a, part, f.panels[thread], f.edge[thread], f.c, window, added)
    if k0 + k == f.k:
        finish(f, thread, rows, columns)


# -- forward ------------------------------------------------------------------------------------


@kernel
def _unpack_rows(panels, rows, weight, n_rows, k, tile):
    """Panels (words, panel) of k numbers of n_rows rows of W.

    LANES rows at a time are unpacked and transposed.
    """
    n, ld = words_of(tile, k), FORWARD_DEPTH // tile.per_word
    numbers = rows[LANES * ld :]  # pairs need half of `rows`
    for first in range(0, n_rows, LANES):
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
        to = panels.ctypes.data + (first // tile.panel * tile.panel * n + first % tile.panel) * 4
        for j in range(0, n, LANES):
            transpose(to + j * tile.panel * 4, tile.panel, rows.ctypes.data + j * 4, ld)


@task_code(TiledProduct)
def _forward_task(f, task, thread):
    first, n_rows, groups = share_of(f, task, FORWARD_COLUMNS)
    here = rows_from(f.w, first)
    for k0 in range(0, f.k, FORWARD_DEPTH):
        k = min(FORWARD_DEPTH, f.k - k0)
        _unpack_rows(f.panels[thread], f.rows[thread], columns_from(here, k0), n_rows, k, f.tile)
        _multiply(f, thread, first, n_rows, groups, k0, k)


# -- backward -----------------------------------------------------------------------------------


@kernel
def _unpack_columns(panels, rows, weight, n_rows, n_columns, tile):
    """Panels (words, panel) of n_columns numbers of n_rows rows of W; two rows make pairs."""
    n = words_of(tile, n_rows)
    for i in range(n):
        if tile.per_word == 1:
            unpack_row(rows.ctypes.data, weight, i, n_columns, PAIR_NUMBERS)
            _spread_row(panels, rows, i, n, n_columns)
            continue
        for j in range(2):
            row = rows[j * BACKWARD_COLUMNS : j * BACKWARD_COLUMNS + n_columns]
            if 2 * i + j < n_rows:
                unpack_row(row.ctypes.data, weight, 2 * i + j, n_columns, PAIR_NUMBERS)
            else:
                fill(row, np.float32(0))
        for column in range(0, n_columns, tile.panel):
            to = panels.ctypes.data + (column * n + i * tile.panel) * 4
            of = rows.ctypes.data + column * 4
            round_two(to, of, of + BACKWARD_COLUMNS * 4, tile.panel)


@kernel
def _spread_row(panels, row, i, n, n_columns):
    """Write a row of numbers to row i of the panels (n, panel)."""
    for column in range(0, n_columns, _PANEL):
        to = panels[column * n + i * _PANEL :][:_PANEL]
        of = row[column:][:_PANEL]
        for j in range(_PANEL):
            to[j] = of[j]


@task_code(TiledProduct)
def _backward_task(f, task, thread):
    first, n_columns, groups = share_of(f, task, BACKWARD_COLUMNS)
    here = columns_from(f.w, first)
    for k0 in range(0, f.k, BACKWARD_DEPTH):
        k = min(BACKWARD_DEPTH, f.k - k0)
        _unpack_columns(f.panels[thread], f.rows[thread], rows_from(here, k0), k, n_columns, f.tile)
        _multiply(f, thread, first, n_columns, groups, k0, k)


# -- the paths ----------------------------------------------------------------------------------

_TASKS = Tasks(_pack_task, _forward_task, _backward_task)


def _tile(p: Problem) -> Tile:
    return PAIR_TILE if p.rounds else FLOAT_TILE


def _bind(p: Problem, o: Operands, **scratch: np.ndarray) -> Call:
    w = block_matrix(o.b, p.weight_type, UNPACK[p.weight_type.name].address)
    return tiled_call(_TASKS, TiledProduct, p, o, w, _tile(p), scratch)


def _layout(p: Problem) -> Layout:
    tile = _tile(p)
    to_pack = tile.padded_mr * PIECE_WORDS + PAIR_NUMBERS
    return Layout(
        packed_a=Array((tile.packed_words(p.m, p.k),)),
        rows=per_thread(max(to_pack, LANES * FORWARD_DEPTH, 2 * BACKWARD_COLUMNS)),
        panels=per_thread(max(FORWARD_DEPTH * FORWARD_COLUMNS, BACKWARD_DEPTH * BACKWARD_COLUMNS)),
        edge=per_thread(tile.mr * tile.panel),
        **scratch_of(p, FORWARD_COLUMNS if p.form == "mul_mat" else BACKWARD_COLUMNS),
    )


BF16 = ProductPath(
    name="bf16", takes=lambda p: p.rounds, layout=_layout, bind=_bind, shares=True, joins=True
)  # fmt: skip
F32 = ProductPath(
    name="f32", takes=lambda p: True, layout=_layout, bind=_bind, shares=True, joins=True
)  # fmt: skip
