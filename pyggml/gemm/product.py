"""The products with a packed weight, blocked for the caches. T tokens, N rows of W, K numbers each.

forward    y[T, N]  (+)= x[T, K] · W[N, K]ᵀ   W in any weight type
backward   dx[T, K] (+)= dy[T, N] · W[N, K]   the same W read the same way, never transposed whole

The side that the microkernel broadcasts (x, dy) is packed once. W is unpacked tile by tile into a
thread's scratch, once per call, and used for all tokens. Every sum runs in an order that depends on
the shapes only, so that threads do not change it. With `pairs` both sides are rounded to bfloat16
as they are packed. Matrices of float32 come as one flat array with strides in elements.
"""

from __future__ import annotations

import numpy as np

from pyggml._frames import Bool
from pyggml._jit import kernel
from pyggml._simd import fill
from pyggml._tasks import task_code
from pyggml.call import Call
from pyggml.gemm.frames import (
    COLUMNS,
    Tasks,
    TiledProduct,
    block_matrix,
    columns_from,
    rows_from,
    share_of,
    tiled_call,
    unpack_row,
)
from pyggml.gemm.panels import (
    DEPTH,
    HALF,
    LANES,
    MR,
    PADDED_MR,
    PAIRED,
    PANEL,
    TILE,
    multiply_panel,
    pack_group,
    pack_pairs_group,
    packed_slots,
    round_row,
    round_two,
    slots_of,
    transpose,
)
from pyggml.gemm.path import Operands, Path, Problem
from pyggml.quants.unpack import UNPACK
from pyggml.scratch import Array, Layout, per_thread

CHUNK = 128  # weight rows that one backward pass reduces over; a multiple of PAIRED

# Floats of a thread's scratch: unpacked rows, the tile in panels, and one edge of C.
ROWS = max(LANES * DEPTH, 2 * COLUMNS, PADDED_MR * HALF + PAIRED)
TILE_FLOATS = max(DEPTH * TILE, CHUNK * COLUMNS)
SCRATCH = ROWS + TILE_FLOATS + MR * PANEL


class FloatProduct(TiledProduct):
    """Of float32, or of bfloat16 in pairs."""

    pairs: Bool


@kernel
def _scratch_of(f, thread):
    """This thread's unpacked rows, tile and edge."""
    mine = f.scratch[thread]
    return mine[:ROWS], mine[ROWS : ROWS + TILE_FLOATS], mine[ROWS + TILE_FLOATS :]


@task_code(FloatProduct)
def _pack_task(f, task, thread):
    """Pack one group of A's rows."""
    if f.pairs:
        pack_pairs_group(f.packed_a, f.a, f.lda, f.m, f.k, task, _scratch_of(f, thread)[0])
    else:
        pack_group(f.packed_a, f.a, 0, f.lda, 1, f.m, f.k, task)


# -- forward ------------------------------------------------------------------------------------


@kernel
def _unpack_tile(tile, rows, weight, n_rows, k0, k, pairs):
    """Panels (k, PANEL) from rows of W, LANES at a time: unpack to `rows`, then transpose."""
    here, n = columns_from(weight, k0), slots_of(k, pairs)
    wide = HALF if pairs else DEPTH
    one = tile[TILE_FLOATS - DEPTH :]  # pairs leave the second half of the tile free
    for first in range(0, n_rows, LANES):
        for i in range(LANES):
            row = rows[i * wide : i * wide + n]
            if first + i >= n_rows:
                fill(row, np.float32(0))
            elif pairs:
                unpack_row(one.ctypes.data, here, first + i, k, LANES)
                fill(one[k : 2 * n], np.float32(0))
                round_row(row.ctypes.data, one.ctypes.data, 2 * n)
            else:
                unpack_row(row.ctypes.data, here, first + i, k, LANES)
        panel = tile.ctypes.data + (first // PANEL * PANEL * n + first % PANEL) * 4
        for j in range(0, n, LANES):
            transpose(panel + j * PANEL * 4, PANEL, rows.ctypes.data + j * 4, wide)


@task_code(FloatProduct)
def _forward_task(f, task, thread):
    c, packed, pairs, accumulate = f.c, f.packed_a, f.pairs, f.accumulate
    rows, tile, edge = _scratch_of(f, thread)
    number, groups = share_of(f, task)
    first = number * TILE
    here, n_rows = rows_from(f.w, first), min(TILE, f.n - first)
    for k0 in range(0, f.k, DEPTH):
        k = min(DEPTH, f.k - k0)
        n = slots_of(k, pairs)
        _unpack_tile(tile, rows, here, n_rows, k0, k, pairs)
        for column in range(0, n_rows, PANEL):
            multiply_panel(
                packed, slots_of(f.k, pairs), k0 // 2 if pairs else k0, n, pairs, groups,
                tile.ctypes.data + column * n * 4, edge, c, first + column, f.n, f.m,
                min(PANEL, n_rows - column), accumulate or k0 > 0,
            )  # fmt: skip


# -- backward -----------------------------------------------------------------------------------


@kernel
def _unpack_columns(tile, rows, weight, n_rows, k, pairs):
    """Panels (n_rows, PANEL) from k columns of W's rows, with `pairs` two rows to a slot."""
    n = slots_of(n_rows, pairs)
    for i in range(n):
        if not pairs:
            unpack_row(rows.ctypes.data, weight, i, k, PAIRED)
            _spread_row(tile, rows, i, n, k)
            continue
        for j in range(2):
            row = rows[j * COLUMNS : j * COLUMNS + k]
            if 2 * i + j < n_rows:
                unpack_row(row.ctypes.data, weight, 2 * i + j, k, PAIRED)
            else:
                fill(row, np.float32(0))
        for column in range(0, k, PANEL):
            to = tile.ctypes.data + (column * n + i * PANEL) * 4
            of = rows.ctypes.data + column * 4
            round_two(to, of, of + COLUMNS * 4, PANEL)


@kernel
def _spread_row(tile, row, i, n, k):
    """Row i of the panels (n, PANEL) from k unpacked weights."""
    for column in range(0, k, PANEL):
        to = tile[column * n + i * PANEL :][:PANEL]
        of = row[column:][:PANEL]
        for j in range(PANEL):
            to[j] = of[j]


@task_code(FloatProduct)
def _backward_task(f, task, thread):
    c, packed, pairs, accumulate = f.c, f.packed_a, f.pairs, f.accumulate
    rows, tile, edge = _scratch_of(f, thread)
    number, groups = share_of(f, task)
    first = number * COLUMNS
    here, n_columns = columns_from(f.w, first), min(COLUMNS, f.n - first)
    for k0 in range(0, f.k, CHUNK):
        k = min(CHUNK, f.k - k0)
        n = slots_of(k, pairs)
        _unpack_columns(tile, rows, rows_from(here, k0), k, n_columns, pairs)
        for column in range(0, n_columns, PANEL):
            multiply_panel(
                packed, slots_of(f.k, pairs), k0 // 2 if pairs else k0, n, pairs, groups,
                tile.ctypes.data + column * n * 4, edge, c, first + column, f.n, f.m,
                min(PANEL, n_columns - column), accumulate or k0 > 0,
            )  # fmt: skip


# -- the paths ----------------------------------------------------------------------------------

_TASKS = Tasks(_pack_task, _forward_task, _backward_task)


def _bind(p: Problem, o: Operands, packed_a: np.ndarray, scratch: np.ndarray) -> Call:
    w = block_matrix(o.b, p.weight, UNPACK[p.weight.name].address)
    return tiled_call(_TASKS, FloatProduct, p, o, w, packed_a, scratch, pairs=p.rounds)


def _layout(p: Problem) -> Layout:
    packed = packed_slots(p.m, p.k, p.rounds)
    return Layout(packed_a=Array((packed,)), scratch=per_thread(SCRATCH))


BF16 = Path(name="bf16", takes=lambda p: p.rounds, layout=_layout, bind=_bind, shares=True)
F32 = Path(name="f32", takes=lambda p: True, layout=_layout, bind=_bind, shares=True)
