"""The matrix products, blocked for the caches. T tokens, N weight rows, K numbers in a row.

forward    y[T, N]  (+)= x[T, K] · W[N, K]ᵀ   W in any weight type
backward   dx[T, K] (+)= dy[T, N] · W[N, K]   the same W read the same way, never transposed whole
strided    c[M, N]  (+)= a[M, K] · b[N, K]ᵀ   float32, any strides, batches

The side that the microkernel broadcasts (x, dy, a) is packed once: groups of MR rows, interleaved
as (depth, MR). The other side is unpacked tile by tile into a thread's scratch, once per call, and
used for all tokens. Every sum runs in an order that depends on the shapes only, so that threads do
not change it. Matrices of float32 come as one flat array with strides in elements.
"""

from __future__ import annotations

import numpy as np

from pyggml._jit import kernel, task_code
from pyggml._tasks import floats1, floats2, frame, integer, launch, stage
from pyggml.gemm.isa import CHOSEN
from pyggml.gemm.microkernel import call_block, make_tile_product, make_transpose
from pyggml.tensor import Call

LANES, MR, PANEL = CHOSEN.lanes, CHOSEN.mr, CHOSEN.panel
PADDED_MR = CHOSEN.padded_mr
TILE = 64  # weight rows of one forward task; a multiple of every panel
DEPTH = 256  # reduction length of one pass; a multiple of every block length
COLUMNS = 256  # weight columns of one backward task; a multiple of every block length
CHUNK = 128  # weight rows that one backward pass reduces over

# Floats of scratch that one thread needs: unpacked rows, the tile in panels, and one edge of C.
ROWS = max(LANES * DEPTH, COLUMNS)
TILE_FLOATS = max(DEPTH * TILE, CHUNK * COLUMNS)
SCRATCH = ROWS + TILE_FLOATS + MR * PANEL

_tile_product = make_tile_product(MR, CHOSEN.nv, LANES)
_transpose = make_transpose(LANES)


def packed_floats(n_rows: int, depth: int) -> int:
    """Floats of the packed form of an (n_rows, depth) matrix."""
    return -(-n_rows // MR) * MR * depth


@kernel
def _pack_group(packed, x, start, row_step, column_step, n_rows, depth, group):
    """Rows group·MR … of x, interleaved as (depth, MR); rows past the end are zeros."""
    first = group * MR
    mine = packed[group * MR * depth : (group + 1) * MR * depth]
    done = 0
    if row_step == 1:  # a transposed matrix: its columns are contiguous
        n = min(MR, n_rows - first)
        for k in range(depth):
            to, of = mine[k * MR :][:MR], x[start + first + k * column_step :]
            for i in range(n):
                to[i] = of[i]
            for i in range(n, MR):
                to[i] = 0
        return
    if column_step == 1 and first + PADDED_MR <= n_rows:
        done = (depth - 1) // LANES * LANES
        _interleave(
            mine.ctypes.data, x.ctypes.data + (start + first * row_step) * 4, row_step, done
        )
    for i in range(MR):
        inside = first + i < n_rows
        for k in range(done, depth):
            source = start + (first + i) * row_step + k * column_step
            mine[k * MR + i] = x[source] if inside else 0


@kernel
def _interleave(to, of, row_step, depth):
    """(depth, MR) from PADDED_MR rows of floats; addresses, depth in whole vectors.

    A store of a whole vector runs over into the next row, which the next store puts right; after
    the last row up to LANES floats are overwritten.
    """
    for k in range(0, depth, LANES):
        for i in range(PADDED_MR - LANES, -1, -LANES):
            _transpose(to + (k * MR + i) * 4, MR, of + (i * row_step + k) * 4, row_step)


@kernel
def _multiply_panel(
    packed, depth, k0, k, groups, b, edge, c, c_start, ldc, n_rows, n_columns, accumulate
):
    """c[:, :n_columns] (+)= packed[:, k0:k0+k] · b for groups (first, past the last) of MR rows.

    b is the address of a panel (k, PANEL).
    """
    c_at, edge_at, packed_at = c.ctypes.data, edge.ctypes.data, packed.ctypes.data
    for g in range(groups[0], groups[1]):
        a = packed_at + (g * depth + k0) * MR * 4
        here = c_start + g * MR * ldc
        rows = min(MR, n_rows - g * MR)
        if rows == MR and n_columns == PANEL:
            _tile_product(a, b, PANEL, c_at + here * 4, ldc, k, accumulate)
            continue
        _tile_product(a, b, PANEL, edge_at, PANEL, k, 0)
        for i in range(rows):
            for j in range(n_columns):
                old = c[here + i * ldc + j] if accumulate else np.float32(0)
                c[here + i * ldc + j] = old + edge[i * PANEL + j]


@kernel
def _split(n_groups, n_parts, part):
    """The groups of one of n_parts equal shares."""
    return n_groups * part // n_parts, n_groups * (part + 1) // n_parts


# -- forward ------------------------------------------------------------------------------------


@kernel
def _unpack_tile(tile, rows, weight, n_rows, k0, k):
    """Panels (k, PANEL) from rows of W, LANES at a time: unpack to `rows`, then transpose."""
    address, row_bytes, code, block, block_bytes = weight
    source = address + k0 // block * block_bytes
    for first in range(0, n_rows, LANES):
        for i in range(LANES):
            if first + i < n_rows:
                row = source + (first + i) * row_bytes
                call_block(code, rows.ctypes.data + i * DEPTH * 4, row, k // block)
            else:
                for j in range(k):
                    rows[i * DEPTH + j] = 0
        panel = tile.ctypes.data + (first // PANEL * PANEL * k + first % PANEL) * 4
        for j in range(0, k, LANES):
            _transpose(panel + j * PANEL * 4, PANEL, rows.ctypes.data + j * 4, DEPTH)


@kernel
def _weight(frame):
    """Address, bytes of a row, address of the unpacker, elements and bytes of a block."""
    ints = (integer(frame, 3), integer(frame, 4), integer(frame, 5))
    return (*ints, integer(frame, 6), integer(frame, 7))


@kernel
def _scratch(frame, thread):
    """This thread's unpacked rows, tile and edge."""
    mine = floats2(frame, 13)[thread]
    return mine[:ROWS], mine[ROWS : ROWS + TILE_FLOATS], mine[ROWS + TILE_FLOATS :]


def _pack_task(frame, task, thread):
    """Pack one group of x (or dy): T rows of the length that is summed over."""
    n_rows, depth = integer(frame, 8), integer(frame, 15)
    _pack_group(floats1(frame, 12), floats1(frame, 1), 0, integer(frame, 2), 1, n_rows, depth, task)


def _forward_task(frame, task, thread):
    y, packed = floats1(frame, 0), floats1(frame, 12)
    n_tokens, n_out, depth = integer(frame, 8), integer(frame, 9), integer(frame, 10)
    accumulate, n_parts = integer(frame, 11), integer(frame, 14)
    rows, tile, edge = _scratch(frame, thread)
    groups = _split((n_tokens + MR - 1) // MR, n_parts, task % n_parts)
    first = task // n_parts * TILE
    weight = _weight(frame)
    here = (weight[0] + first * weight[1], *weight[1:])
    n_rows = min(TILE, n_out - first)
    for k0 in range(0, depth, DEPTH):
        k = min(DEPTH, depth - k0)
        _unpack_tile(tile, rows, here, n_rows, k0, k)
        for column in range(0, n_rows, PANEL):
            _multiply_panel(
                packed, depth, k0, k, groups, tile.ctypes.data + column * k * 4, edge, y,
                first + column, n_out, n_tokens, min(PANEL, n_rows - column),
                accumulate or k0 > 0,
            )  # fmt: skip


# So few tokens would leave the tiles empty: each weight row is a dot product.
FEW = max(1, MR // 4)


def _few_task(frame, task, thread):
    """LANES weight rows, unpacked and multiplied one by one."""
    y, x, x_step = floats1(frame, 0), floats1(frame, 1), integer(frame, 2)
    n_tokens, n_out, depth = integer(frame, 8), integer(frame, 9), integer(frame, 10)
    address, row_bytes, code, block, block_bytes = _weight(frame)
    row, _, _ = _scratch(frame, thread)
    for n in range(task * LANES, min((task + 1) * LANES, n_out)):
        if not integer(frame, 11):
            for t in range(n_tokens):
                y[t * n_out + n] = 0
        for k0 in range(0, depth, DEPTH):
            k = min(DEPTH, depth - k0)
            source = address + n * row_bytes + k0 // block * block_bytes
            call_block(code, row.ctypes.data, source, k // block)
            for t in range(n_tokens):
                start = t * x_step + k0
                y[t * n_out + n] += _dot(row[:k], x[start : start + k])


@kernel
def _dot(a, b):
    total = np.float32(0)
    for i in range(a.shape[0]):
        total += a[i] * b[i]
    return total


# -- backward -----------------------------------------------------------------------------------


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
    accumulate, n_parts = integer(frame, 11), integer(frame, 14)
    row, tile, edge = _scratch(frame, thread)
    groups = _split((n_tokens + MR - 1) // MR, n_parts, task % n_parts)
    k0 = task // n_parts * COLUMNS
    k = min(COLUMNS, depth - k0)
    address, row_bytes, code, block, block_bytes = _weight(frame)
    source = address + k0 // block * block_bytes
    for n0 in range(0, n_out, CHUNK):
        n = min(CHUNK, n_out - n0)
        for i in range(n):
            call_block(code, row.ctypes.data, source + (n0 + i) * row_bytes, k // block)
            _spread_row(tile, row, i, n, k)
        for column in range(0, k, PANEL):
            _multiply_panel(
                packed, n_out, n0, n, groups, tile.ctypes.data + column * n * 4, edge, dx,
                k0 + column, depth, n_tokens, min(PANEL, k - column), accumulate or n0 > 0,
            )  # fmt: skip


# -- strided float32 ----------------------------------------------------------------------------


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
    _pack_group(
        _batch(frame, batch), floats1(frame, 1), start, integer(frame, 3), integer(frame, 4),
        integer(frame, 8), integer(frame, 10), group,
    )  # fmt: skip


def _strided_task(frame, task, thread):
    c, b = floats1(frame, 0), floats1(frame, 18)
    n_rows, n_out, depth = integer(frame, 8), integer(frame, 9), integer(frame, 10)
    row_step, column_step = integer(frame, 6), integer(frame, 7)
    n_parts, n_tiles = integer(frame, 14), (n_out + TILE - 1) // TILE
    batch, rest = task // (n_tiles * n_parts), task % (n_tiles * n_parts)
    _, tile, edge = _scratch(frame, thread)
    groups = _split((n_rows + MR - 1) // MR, n_parts, rest % n_parts)
    first = rest // n_parts * TILE
    n = min(TILE, n_out - first)
    start = batch // integer(frame, 16) * integer(frame, 5) + first * row_step
    for k0 in range(0, depth, DEPTH):
        k = min(DEPTH, depth - k0)
        _gather_tile(tile, b, start + k0 * column_step, row_step, column_step, n, k)
        for column in range(0, n, PANEL):
            _multiply_panel(
                _batch(frame, batch), depth, k0, k, groups, tile.ctypes.data + column * k * 4,
                edge, c, batch * n_rows * n_out + first + column, n_out, n_rows,
                min(PANEL, n - column), integer(frame, 11) or k0 > 0,
            )  # fmt: skip


# -- binding ------------------------------------------------------------------------------------

Weight = tuple[int, int, int, int, int]  # as `_weight` reads it
Steps = tuple[int, int, int]  # of batch, row and column, in floats

_PACK, _FORWARD, _FEW = task_code(_pack_task), task_code(_forward_task), task_code(_few_task)
_BACKWARD = task_code(_backward_task)
_PACK_STRIDED, _STRIDED = task_code(_pack_strided_task), task_code(_strided_task)


def _parts(n_rows: int, n_tiles: int, n_threads: int) -> int:
    """Shares of the rows that give every thread something to do; each unpacks its tile anew."""
    return min(-(-n_rows // MR), max(1, 2 * n_threads // n_tiles))


def forward(
    y: np.ndarray, x: np.ndarray, x_step: int, weight: Weight, shape: tuple[int, int, int],
    accumulate: bool, packed: np.ndarray, scratch: np.ndarray,
) -> Call:  # fmt: skip
    """y (+)= x · Wᵀ; y and x flat, rows of x x_step floats apart; shape (T, N, K)."""
    n_tokens, n_out, depth = shape
    parts = _parts(n_tokens, -(-n_out // TILE), len(scratch))
    slots = frame(y, x, x_step, *weight, *shape, accumulate, packed, scratch, parts, depth)
    if n_tokens <= FEW:
        return launch, (stage(_FEW, slots, -(-n_out // LANES)),)
    pack = stage(_PACK, slots, -(-n_tokens // MR))
    return launch, (pack, stage(_FORWARD, slots, -(-n_out // TILE) * parts))


def backward(
    dx: np.ndarray, dy: np.ndarray, dy_step: int, weight: Weight, shape: tuple[int, int, int],
    accumulate: bool, packed: np.ndarray, scratch: np.ndarray,
) -> Call:  # fmt: skip
    """dx (+)= dy · W; dx and dy flat, rows of dy dy_step floats apart; shape (T, N, K)."""
    n_tokens, n_out, depth = shape
    parts = _parts(n_tokens, -(-depth // COLUMNS), len(scratch))
    slots = frame(dx, dy, dy_step, *weight, *shape, accumulate, packed, scratch, parts, n_out)
    pack = stage(_PACK, slots, -(-n_tokens // MR))
    return launch, (pack, stage(_BACKWARD, slots, -(-depth // COLUMNS) * parts))


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
    parts = _parts(n_rows, n_tiles * n_batches, len(scratch))
    slots = frame(
        c, a, *a_steps, *b_steps, *shape[1:], accumulate, packed, scratch, parts, *repeats,
        n_groups * MR * depth, b,
    )  # fmt: skip
    pack = stage(_PACK_STRIDED, slots, n_batches * n_groups)
    return launch, (pack, stage(_STRIDED, slots, n_batches * n_tiles * parts))
