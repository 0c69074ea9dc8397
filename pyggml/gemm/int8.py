"""The products with a packed weight in integers: both sides as bytes, in blocks of 32 along K or N.

x is rounded to bytes with one scale for 32 numbers as it is packed (pyggml.gemm.activations): that
is the whole error, NMSE 3e-5 of normal numbers, but for Q6_K, where two groups of weights get one
scale, 4e-5. Backward, sums go over rows of W, whose scales differ: each column's 32 numbers are
rounded anew to bytes, as dy is, 6e-5. Blocked as in pyggml.gemm.product.

Packed x, for each group of MR rows, with B = K / 32: (8B, MR) slots of four bytes, then (B, 3, MR)
scales, what the integer sums begin with, and totals, which minima are multiplied with.
A tile of W: panels (SLOTS, BYTE_PANEL) of bytes, then panels (2·BLOCKS, BYTE_PANEL) of scales and
of minima.
"""

from __future__ import annotations

import numpy as np

from pyggml._frames import Bool
from pyggml._jit import BlockCode, block_code, kernel
from pyggml._simd import fill
from pyggml._tasks import task_code
from pyggml.call import Call
from pyggml.gemm.activations import QUADS, quantize_for_tile
from pyggml.gemm.dots import step
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
from pyggml.gemm.int8_tile import (
    BLOCKS,
    BYTE_PANEL,
    CHUNK,
    DEPTH,
    KINDS,
    ROW,
    ROWS,
    SLOTS,
    byte_product,
    quantize_columns,
    unpack_bytes,
)
from pyggml.gemm.microkernel import fetch
from pyggml.gemm.panels import (
    LANES,
    MR,
    PANEL,
    SPILL,
    TILE,
    add_edge,
    interleave,
    transpose,
)
from pyggml.gemm.path import Operands, Path, Problem
from pyggml.quants.layout import GROUP
from pyggml.quants.unpack import MINIMA_TYPES, UNPACK
from pyggml.scratch import Array, Layout, per_thread
from pyggml.sizes import round_up

# Floats of a thread's scratch: unpacked rows, the tile in panels, and one edge of C.
UNPACKED = max(ROWS, GROUP * COLUMNS)
TILE_FLOATS = max(TILE, COLUMNS) * ROW
SCRATCH = UNPACKED + TILE_FLOATS + MR * PANEL


class Int8Product(TiledProduct):
    """Of bytes; B's blocks may have minima beside their scales."""

    has_minima: Bool


@kernel
def _scratch_of(f, thread):
    """This thread's unpacked rows, tile and edge."""
    mine = f.scratch[thread]
    rows, rest = mine[:UNPACKED], mine[UNPACKED:]
    return rows, rest[:TILE_FLOATS], rest[TILE_FLOATS:]


# -- packing x ----------------------------------------------------------------------------------


@kernel
def _group(packed, depth, group):
    """A group's slots of bytes, and its sides (B, 3, MR)."""
    n = depth // GROUP * MR
    first = group * (QUADS + 3) * n
    return packed[first : first + QUADS * n], packed[first + QUADS * n : first + (QUADS + 3) * n]


@task_code(Int8Product)
def _pack_task(f, task, thread):
    """One group of A's rows."""
    a = f.a
    rows, _, _ = _scratch_of(f, thread)
    slots, sides = _group(f.packed_a, f.k, task)
    for k0 in range(0, f.k, DEPTH):
        n = min(DEPTH, f.k - k0) // GROUP
        beside = sides[k0 // GROUP * 3 * MR :]
        for i in range(MR):
            row = rows[i * SLOTS : (i + 1) * SLOTS]
            if task * MR + i < f.m:
                of = a[(task * MR + i) * f.lda + k0 :].ctypes.data
                fetch(of + 4 * f.lda, 4 * n * GROUP)  # the next row's
                quantize_for_tile(row.ctypes.data, beside[i:].ctypes.data, MR, of, n)
            else:
                fill(row, np.float32(0))
                for side in range(3 * n):
                    beside[side * MR + i] = np.float32(0)
        _put_slots(slots[k0 // 4 * MR :], rows, n * QUADS)


@kernel
def _put_slots(slots, rows, n):
    """(n, MR) from rows of SLOTS."""
    done = max(0, n - SPILL) // LANES * LANES
    interleave(slots.ctypes.data, rows.ctypes.data, SLOTS, done)
    for k in range(done, n):
        for i in range(MR):
            slots[k * MR + i] = rows[i * SLOTS + k]


# -- a tile of W --------------------------------------------------------------------------------


def _unpacker(kind: int) -> BlockCode:
    """Blocks of one type to a row of ROW slots."""

    def unpack(dst, src, n_blocks):
        unpack_bytes(kind, dst, src, n_blocks)

    return block_code(unpack)


_BYTES = {name: _unpacker(i) for i, name in enumerate(KINDS)}


@kernel
def _unpack_tile(tile, rows, weight, n_rows, k0, k):
    """Panels of bytes, then of scales and minima, from LANES rows of W at a time."""
    here = columns_from(weight, k0)
    for first in range(0, n_rows, LANES):
        for i in range(LANES):
            row = rows[i * ROW : (i + 1) * ROW]
            if first + i < n_rows:
                unpack_row(row.ctypes.data, here, first + i, k, LANES)
            else:
                fill(row, np.float32(0))
        of, panel, column = rows.ctypes.data, first // BYTE_PANEL, first % BYTE_PANEL
        to = tile.ctypes.data + (panel * SLOTS * BYTE_PANEL + column) * 4
        for j in range(0, k // 4, LANES):
            transpose(to + j * BYTE_PANEL * 4, BYTE_PANEL, of + j * 4, ROW)
        to = tile.ctypes.data + (TILE * SLOTS + panel * 2 * BLOCKS * BYTE_PANEL + column) * 4
        for j in range(0, 2 * BLOCKS, LANES):
            transpose(to + j * BYTE_PANEL * 4, BYTE_PANEL, of + (SLOTS + j) * 4, ROW)


@kernel
def _multiply_tile(f, tile, edge, groups, first, columns, k0, k, added):
    """C[:, first : first + columns[0]] (+)= A[:, k0 : k0 + k] · tile, for groups of MR rows.

    columns: how many there are, and how many a whole tile has.
    """
    c, packed = f.c, f.packed_a
    for g in range(groups[0], groups[1]):
        slots, a_sides = _group(packed, f.k, g)
        a = slots[k0 // 4 * MR :].ctypes.data
        beside = a_sides[k0 // GROUP * 3 * MR :].ctypes.data
        for column in range(0, columns[0], BYTE_PANEL):
            panel = tile.ctypes.data + column * SLOTS * 4
            sides = tile.ctypes.data + (columns[1] * SLOTS + column * 2 * BLOCKS) * 4
            n_columns = min(BYTE_PANEL, columns[0] - column)
            start = g * MR * f.n + first + column
            n = min(MR, f.m - g * MR)
            whole = n == MR and n_columns == BYTE_PANEL
            to, ldc = (c.ctypes.data + start * 4, f.n) if whole else (edge.ctypes.data, PANEL)
            kept = whole and added
            byte_product(a, beside, panel, sides, to, ldc, k // GROUP, f.has_minima, kept)
            if not whole:
                add_edge(c, start, f.n, edge, n, n_columns, added)


@task_code(Int8Product)
def _forward_task(f, task, thread):
    rows, tile, edge = _scratch_of(f, thread)
    number, groups = share_of(f, task)
    first = number * TILE
    here, n_rows = rows_from(f.w, first), min(TILE, f.n - first)
    for k0 in range(0, f.k, DEPTH):
        k = min(DEPTH, f.k - k0)
        _unpack_tile(tile, rows, here, n_rows, k0, k)
        added = f.accumulate or k0 > 0
        _multiply_tile(f, tile, edge, groups, first, (n_rows, TILE), k0, k, added)


# -- backward: dx[T, K] (+)= dy[T, N] · W[N, K], summed over rows of W ----------------------------


@kernel
def _unpack_columns(tile, rows, weight, n_rows, n_columns):
    """Panels of bytes and of scales from n_columns of W's rows, GROUP of these at a time."""
    for first in range(0, n_rows, GROUP):
        for i in range(GROUP):
            row = rows[i * COLUMNS : (i + 1) * COLUMNS]
            unpack_row(row.ctypes.data, weight, first + i, n_columns, GROUP)
        for column in range(0, n_columns, LANES):
            panel, j = column // BYTE_PANEL * BYTE_PANEL, column % BYTE_PANEL
            to = panel * SLOTS + first // 4 * BYTE_PANEL + j
            scales = COLUMNS * SLOTS + panel * 2 * BLOCKS + first // GROUP * BYTE_PANEL + j
            of = rows[column:].ctypes.data
            quantize_columns(tile[to:].ctypes.data, tile[scales:].ctypes.data, of, COLUMNS)


@task_code(Int8Product)
def _backward_task(f, task, thread):
    rows, tile, edge = _scratch_of(f, thread)
    number, groups = share_of(f, task)
    first = number * COLUMNS
    here, n_columns = columns_from(f.w, first), min(COLUMNS, f.n - first)
    for k0 in range(0, f.k, CHUNK):
        k = min(CHUNK, f.k - k0)
        _unpack_columns(tile, rows, rows_from(here, k0), k, n_columns)
        added = f.accumulate or k0 > 0
        _multiply_tile(f, tile, edge, groups, first, (n_columns, COLUMNS), k0, k, added)


# -- the path -------------------------------------------------------------------------------------

_TASKS = Tasks(_pack_task, _forward_task, _backward_task)


def takes(p: Problem) -> bool:
    """Whether a product with a weight can be one of integers: in whole blocks along W's rows and,
    if it sums over these, in whole blocks of rows."""
    if p.compute != "int8" or p.form == "strided" or p.weight.name not in KINDS:
        return False
    return p.row % step(p.weight) == 0 and p.k % GROUP == 0


def packed_slots(m: int, k: int) -> int:
    """Slots of packed A."""
    return round_up(m, MR) * (QUADS + 3) * (k // GROUP)


def _layout(p: Problem) -> Layout:
    return Layout(packed_a=Array((packed_slots(p.m, p.k),)), scratch=per_thread(SCRATCH))


def _bind(p: Problem, o: Operands, packed_a: np.ndarray, scratch: np.ndarray) -> Call:
    name, forward = p.weight.name, p.form == "mul_mat"
    w = block_matrix(o.b, p.weight, (_BYTES if forward else UNPACK)[name].address)
    minima = forward and name in MINIMA_TYPES
    return tiled_call(_TASKS, Int8Product, p, o, w, packed_a, scratch, has_minima=minima)


INT8 = Path(name="int8", takes=takes, layout=_layout, bind=_bind, shares=True)
