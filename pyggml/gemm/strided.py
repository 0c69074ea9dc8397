"""The product of two float32 matrices with any strides, in batches: what the weights' is not.

strided    c[M, N]  (+)= a[M, K] · b[N, K]ᵀ

Blocked as pyggml.gemm.product; here the panels are gathered from b's rows or columns.
"""

from __future__ import annotations

import numpy as np

from pyggml._jit import kernel, task_code
from pyggml._tasks import floats1, floats2, frame, integer, launch, stage
from pyggml.gemm.frames import parts
from pyggml.gemm.panels import DEPTH, MR, PANEL, TILE, multiply_panel, pack_group, split
from pyggml.tensor import Call

TILE_FLOATS = DEPTH * TILE  # of one tile in panels; an edge of c follows it in a thread's scratch


@kernel
def _gather_tile(tile, b, start, row_step, column_step, n_rows, k):
    """Panels (k, PANEL) from n_rows strided rows of b; missing rows up to a whole one are zeros."""
    for first in range(0, n_rows, PANEL):
        n = min(PANEL, n_rows - first)
        panel = tile[first * k : (first + PANEL) * k]
        if n < PANEL:
            for i in range(k * PANEL):
                panel[i] = 0
        source = start + first * row_step
        if row_step == 1:  # a transposed matrix: its columns are contiguous
            for j in range(k):
                for i in range(n):
                    panel[j * PANEL + i] = b[source + j * column_step + i]
        else:
            for i in range(n):
                for j in range(k):
                    panel[j * PANEL + i] = b[source + i * row_step + j * column_step]


@kernel
def _batch(frame, batch):
    """The packed side of one batch."""
    size = integer(frame, 17)
    return floats1(frame, 12)[batch * size : (batch + 1) * size]


def _pack_strided_task(frame, task, thread):
    n_groups = (integer(frame, 8) + MR - 1) // MR
    batch, group = task // n_groups, task % n_groups
    start = batch // integer(frame, 15) * integer(frame, 2)
    pack_group(
        _batch(frame, batch), floats1(frame, 1), start, integer(frame, 3), integer(frame, 4),
        integer(frame, 8), integer(frame, 10), group,
    )  # fmt: skip


def _strided_task(frame, task, thread):
    c, b = floats1(frame, 0), floats1(frame, 18)
    n_rows, n_out, depth = integer(frame, 8), integer(frame, 9), integer(frame, 10)
    row_step, column_step = integer(frame, 6), integer(frame, 7)
    n_parts, n_tiles = integer(frame, 14), (n_out + TILE - 1) // TILE
    batch, rest = task // (n_tiles * n_parts), task % (n_tiles * n_parts)
    mine = floats2(frame, 13)[thread]
    tile, edge = mine[:TILE_FLOATS], mine[TILE_FLOATS:]
    groups = split((n_rows + MR - 1) // MR, n_parts, rest % n_parts)
    first = rest // n_parts * TILE
    n = min(TILE, n_out - first)
    start = batch // integer(frame, 16) * integer(frame, 5) + first * row_step
    for k0 in range(0, depth, DEPTH):
        k = min(DEPTH, depth - k0)
        _gather_tile(tile, b, start + k0 * column_step, row_step, column_step, n, k)
        for column in range(0, n, PANEL):
            multiply_panel(
                _batch(frame, batch), depth, k0, k, False, groups,
                tile.ctypes.data + column * k * 4, edge, c,
                batch * n_rows * n_out + first + column, n_out, n_rows, min(PANEL, n - column),
                integer(frame, 11) or k0 > 0,
            )  # fmt: skip


# -- binding ------------------------------------------------------------------------------------

Steps = tuple[int, int, int]  # of batch, row and column, in floats

_PACK_STRIDED, _STRIDED = task_code(_pack_strided_task), task_code(_strided_task)


def strided(
    c: np.ndarray, a: np.ndarray, b: np.ndarray, a_steps: Steps, b_steps: Steps,
    repeats: tuple[int, int], shape: tuple[int, int, int, int], accumulate: bool,
    packed: np.ndarray, scratch: np.ndarray,
) -> Call:  # fmt: skip
    """c (+)= a · bᵀ for every batch; c contiguous, all flat; shape (batches, M, N, K).

    Batch i of c takes batches i // repeats[0] of a and i // repeats[1] of b.
    """
    n_batches, n_rows, n_out, depth = shape
    n_groups, n_tiles = -(-n_rows // MR), -(-n_out // TILE)
    n_shares = parts(n_rows, n_tiles * n_batches, len(scratch))
    slots = frame(
        c, a, *a_steps, *b_steps, *shape[1:], accumulate, packed, scratch, n_shares, *repeats,
        n_groups * MR * depth, b,
    )  # fmt: skip
    pack = stage(_PACK_STRIDED, slots, n_batches * n_groups)
    return launch, (pack, stage(_STRIDED, slots, n_batches * n_tiles * n_shares))
