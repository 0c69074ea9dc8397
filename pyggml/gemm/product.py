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

from pyggml._jit import kernel, task_code
from pyggml._simd import fill
from pyggml._tasks import floats1, frame, integer, launch, stage
from pyggml.gemm.frames import (
    CHUNK,
    COLUMNS,
    TILE_FLOATS,
    Weight,
    columns_from,
    parts,
    rows_from,
    scratch_of,
    share_of,
    unpack_row,
    weight_of,
)
from pyggml.gemm.panels import (
    DEPTH,
    HALF,
    LANES,
    MR,
    PAIRED,
    PANEL,
    TILE,
    multiply_panel,
    pack_group,
    pack_pairs_group,
    round_row,
    round_two,
    slots_of,
    transpose,
)
from pyggml.tensor import Call


def _pack_task(frame, task, thread):
    """Pack one group of x (or dy): T rows of the length that is summed over."""
    packed, x, x_step = floats1(frame, 12), floats1(frame, 1), integer(frame, 2)
    n_rows, depth = integer(frame, 8), integer(frame, 15)
    if integer(frame, 16):
        pack_pairs_group(packed, x, x_step, n_rows, depth, task, scratch_of(frame, thread)[0])
    else:
        pack_group(packed, x, 0, x_step, 1, n_rows, depth, task)


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


def _forward_task(frame, task, thread):
    y, packed = floats1(frame, 0), floats1(frame, 12)
    n_tokens, n_out, depth = integer(frame, 8), integer(frame, 9), integer(frame, 10)
    accumulate, pairs = integer(frame, 11), integer(frame, 16) != 0
    rows, tile, edge = scratch_of(frame, thread)
    number, groups = share_of(frame, task)
    first = number * TILE
    here, n_rows = rows_from(weight_of(frame), first), min(TILE, n_out - first)
    for k0 in range(0, depth, DEPTH):
        k = min(DEPTH, depth - k0)
        n = slots_of(k, pairs)
        _unpack_tile(tile, rows, here, n_rows, k0, k, pairs)
        for column in range(0, n_rows, PANEL):
            multiply_panel(
                packed, slots_of(depth, pairs), k0 // 2 if pairs else k0, n, pairs, groups,
                tile.ctypes.data + column * n * 4, edge, y, first + column, n_out, n_tokens,
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


def _backward_task(frame, task, thread):
    dx, packed = floats1(frame, 0), floats1(frame, 12)
    n_tokens, n_out, depth = integer(frame, 8), integer(frame, 9), integer(frame, 10)
    accumulate, pairs = integer(frame, 11), integer(frame, 16) != 0
    rows, tile, edge = scratch_of(frame, thread)
    number, groups = share_of(frame, task)
    k0 = number * COLUMNS
    here, k = columns_from(weight_of(frame), k0), min(COLUMNS, depth - k0)
    for n0 in range(0, n_out, CHUNK):
        n_rows = min(CHUNK, n_out - n0)
        n = slots_of(n_rows, pairs)
        _unpack_columns(tile, rows, rows_from(here, n0), n_rows, k, pairs)
        for column in range(0, k, PANEL):
            multiply_panel(
                packed, slots_of(n_out, pairs), n0 // 2 if pairs else n0, n, pairs, groups,
                tile.ctypes.data + column * n * 4, edge, dx, k0 + column, depth, n_tokens,
                min(PANEL, k - column), accumulate or n0 > 0,
            )  # fmt: skip


# -- binding ------------------------------------------------------------------------------------

_PACK, _FORWARD = task_code(_pack_task), task_code(_forward_task)
_BACKWARD = task_code(_backward_task)


def forward(
    y: np.ndarray, x: np.ndarray, x_step: int, weight: Weight, shape: tuple[int, int, int],
    accumulate: bool, pairs: bool, packed: np.ndarray, scratch: np.ndarray, is_packed: bool = False,
) -> Call:  # fmt: skip
    """y (+)= x · Wᵀ; y and x flat, rows of x x_step floats apart; shape (T, N, K).

    is_packed: `packed` will hold x already when this runs.
    """
    n_tokens, n_out, depth = shape
    n_parts = parts(n_tokens, -(-n_out // TILE), len(scratch))
    slots = frame(y, x, x_step, *weight, *shape, accumulate, packed, scratch, n_parts, depth, pairs)
    multiply = stage(_FORWARD, slots, -(-n_out // TILE) * n_parts)
    pack = stage(_PACK, slots, -(-n_tokens // MR))
    return launch, ((multiply,) if is_packed else (pack, multiply))


def backward(
    dx: np.ndarray, dy: np.ndarray, dy_step: int, weight: Weight, shape: tuple[int, int, int],
    accumulate: bool, pairs: bool, packed: np.ndarray, scratch: np.ndarray,
) -> Call:  # fmt: skip
    """dx (+)= dy · W; dx and dy flat, rows of dy dy_step floats apart; shape (T, N, K)."""
    n_tokens, n_out, depth = shape
    n_parts = parts(n_tokens, -(-depth // COLUMNS), len(scratch))
    sides = frame(
        dx, dy, dy_step, *weight, *shape, accumulate, packed, scratch, n_parts, n_out, pairs
    )
    pack = stage(_PACK, sides, -(-n_tokens // MR))
    return launch, (pack, stage(_BACKWARD, sides, -(-depth // COLUMNS) * n_parts))
