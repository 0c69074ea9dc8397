"""Products with a weight on tiles: C (m, n) (+)= A (m, k) · B (k, n), factors rounded to bfloat16.

forward    y  = x · Wᵀ     16 rows of W at a time: their pairs are transposed into B's tiles
backward   dx = dy · W     two rows of W at a time: they are shuffled into B's pairs

A is rounded once, row by row: so tiles take it. A task unpacks some columns of B, a part of k at a
time, and multiplies all tokens of its share with it. Every sum runs in an order that depends on the
shapes only, so that threads do not change it.
"""

from __future__ import annotations

import numpy as np

from pyggml._frames import Bool, Floats2, Int, Shorts1
from pyggml._jit import kernel
from pyggml._simd import fill
from pyggml._tasks import launch, stage, task_code
from pyggml.call import Call
from pyggml.dtypes import F32
from pyggml.gemm.amx.rows import (
    LANES,
    LINE,
    matrix,
    pack_group,
    packed_size,
    pair_rows,
    panel_bytes,
    transpose,
    unpack_rounded,
    whole,
)
from pyggml.gemm.amx.tiles import SIDE, STEP, TILE_BYTES, configure, micro_product, release
from pyggml.gemm.frames import Product, columns_from, rows_from
from pyggml.gemm.panels import split
from pyggml.gemm.path import Operands, Path, Problem, flat
from pyggml.scratch import Array, Layout, per_thread

# Columns of a task, and numbers of k in one of its passes: so much of B stays in the second cache.
# C is read and written once a pass. Backward, columns are a multiple of every block length, as are
# the pieces of W's rows that are unpacked at a time.
FORWARD_COLUMNS, FORWARD_DEPTH = 128, 3072
BACKWARD_COLUMNS, BACKWARD_DEPTH = 256, 1536
PIECE = 512

_FORWARD_PANEL, _BACKWARD_PANEL = panel_bytes(FORWARD_DEPTH), panel_bytes(BACKWARD_DEPTH)
# A thread's scratch, in floats: a square of C, rows of bfloat16, a row of floats, panels of B.
_EDGE = SIDE * SIDE
_LD = (2 * PIECE + LINE) // 4  # slots from row to row
_ROWS = LANES * _LD
_PANELS = max(FORWARD_COLUMNS // SIDE * _FORWARD_PANEL, BACKWARD_COLUMNS // SIDE * _BACKWARD_PANEL)
SCRATCH = _EDGE + _ROWS + PIECE + _PANELS // 4
_ADDING, _NEW = np.int64(1), np.int64(0)


class TileProduct(Product):
    """Tasks multiply one tile of B with a share of A's groups of SIDE rows."""

    packed_a: Shorts1  # rows of bfloat16, k in whole steps and a line apart
    n_shares: Int
    rounds: Bool  # whether W's unpacker writes bfloat16
    scratch: Floats2  # a row for each thread


@kernel
def _scratch_of(f, thread):
    """This thread's square of C, rows, floats and panels."""
    mine = f.scratch[thread]
    rows, rest = mine[_EDGE : _EDGE + _ROWS], mine[_EDGE + _ROWS :]
    return mine[:_EDGE], rows, rest[:PIECE], rest[PIECE:]


# -- packing A ------------------------------------------------------------------------------------


@task_code(TileProduct)
def _pack_task(f, task, thread):
    """A group of SIDE rows of A; rows past the last are zeros."""
    _, _, spare, _ = _scratch_of(f, thread)
    pack_group(f.packed_a, f.a, f.lda, f.m, f.k, task, spare)


# -- B's panels -----------------------------------------------------------------------------------


@kernel
def _transposed_panels(panels, rows, numbers, w, n_rows, k, rounds):
    """B = Wᵀ from k numbers of n_rows rows of W."""
    for first in range(0, whole(n_rows, SIDE), LANES):
        to = (
            panels.ctypes.data + first // SIDE * _FORWARD_PANEL + first % SIDE // LANES * TILE_BYTES
        )
        for k0 in range(0, k, PIECE):
            here, n = columns_from(w, k0), min(PIECE, k - k0)
            for i in range(LANES):
                row = rows[i * _LD : (i + 1) * _LD]
                if first + i < n_rows:
                    unpack_rounded(row, here, first + i, n, rounds, numbers, LANES)
                else:
                    fill(row, np.float32(0))
            for s in range((n + STEP - 1) // STEP):
                there = to + (k0 // STEP + s) * 2 * TILE_BYTES
                transpose(there, LANES, rows.ctypes.data + s * LINE, _LD)


@kernel
def _paired_panels(panels, rows, numbers, w, n_rows, n_columns, rounds):
    """B = n_columns of W from n_rows rows."""
    one, other = rows[:_LD], rows[_LD : 2 * _LD]
    for i in range(0, whole(n_rows, STEP), 2):
        for row, j in ((one, i), (other, i + 1)):
            if j < n_rows:
                unpack_rounded(row, w, j, n_columns, rounds, numbers, 2)
            else:
                fill(row, np.float32(0))
        to = panels.ctypes.data + i // STEP * 2 * TILE_BYTES + i % STEP // 2 * LINE
        n = whole(n_columns, SIDE)
        pair_rows(to, one.ctypes.data, other.ctypes.data, n, _BACKWARD_PANEL)


# -- multiplying ----------------------------------------------------------------------------------


@kernel
def _multiply(f, panels, panel, edge, groups, columns, k0, k):
    """C[:, columns] (+)= A[:, k0 : k0 + k] · B, for groups of SIDE rows."""
    c, ld, steps = f.c, whole(f.k, STEP) + LINE // 2, (k + STEP - 1) // STEP
    added = f.accumulate or k0 > 0
    for g in range(groups[0], groups[1]):
        a = f.packed_a.ctypes.data + 2 * (g * SIDE * ld + k0)
        n_rows = min(SIDE, f.m - g * SIDE)
        for column in range(columns[0], columns[1], SIDE):
            b = panels.ctypes.data + (column - columns[0]) // SIDE * panel
            start, n = g * SIDE * f.n + column, min(SIDE, columns[1] - column)
            if n_rows == SIDE and n == SIDE:
                to = c.ctypes.data + 4 * start
                micro_product(a, 2 * ld, b, to, 4 * f.n, steps, _ADDING if added else _NEW)
            else:
                micro_product(a, 2 * ld, b, edge.ctypes.data, 4 * SIDE, steps, _NEW)
                _put_edge(c, start, f.n, edge, n_rows, n, added)


@kernel
def _put_edge(c, start, ldc, edge, n_rows, n_columns, added):
    """The part of a square, `edge`, that lies inside C."""
    for i in range(n_rows):
        to = c[start + i * ldc : start + i * ldc + n_columns]
        for j in range(n_columns):
            to[j] = edge[i * SIDE + j] + (to[j] if added else np.float32(0))


@kernel
def _share_of(f, task, n_columns):
    """A task's columns, and its groups of rows: first, past the last."""
    first, n_groups = task // f.n_shares * n_columns, (f.m + SIDE - 1) // SIDE
    columns = first, min(first + n_columns, f.n)
    return columns, split(n_groups, f.n_shares, task % f.n_shares)


@task_code(TileProduct)
def _forward_task(f, task, thread):
    edge, rows, numbers, panels = _scratch_of(f, thread)
    columns, groups = _share_of(f, task, FORWARD_COLUMNS)
    here, n = rows_from(f.w, columns[0]), columns[1] - columns[0]
    configure()
    for k0 in range(0, f.k, FORWARD_DEPTH):
        k = min(FORWARD_DEPTH, f.k - k0)
        _transposed_panels(panels, rows, numbers, columns_from(here, k0), n, k, f.rounds)
        _multiply(f, panels, _FORWARD_PANEL, edge, groups, columns, k0, k)
    release()


@task_code(TileProduct)
def _backward_task(f, task, thread):
    edge, rows, numbers, panels = _scratch_of(f, thread)
    columns, groups = _share_of(f, task, BACKWARD_COLUMNS)
    here, n = columns_from(f.w, columns[0]), columns[1] - columns[0]
    configure()
    for k0 in range(0, f.k, BACKWARD_DEPTH):
        k = min(BACKWARD_DEPTH, f.k - k0)
        _paired_panels(panels, rows, numbers, rows_from(here, k0), k, n, f.rounds)
        _multiply(f, panels, _BACKWARD_PANEL, edge, groups, columns, k0, k)
    release()


# -- the paths ------------------------------------------------------------------------------------


def _bind(p: Problem, o: Operands, packed_a: np.ndarray, scratch: np.ndarray) -> Call:
    forward = p.form == "mul_mat"
    columns, code = (
        (FORWARD_COLUMNS, _forward_task) if forward else (BACKWARD_COLUMNS, _backward_task)
    )
    n_tiles, n_groups = -(-p.n // columns), -(-p.m // SIDE)
    n_shares = min(n_groups, max(1, 2 * len(scratch) // n_tiles))
    w, rounds = matrix(o.b, p.weight_type, p.row)
    f = TileProduct(
        c=o.c.reshape(-1), a=flat(o.a), lda=o.lda, w=w, m=p.m, n=p.n, k=p.k,
        accumulate=o.accumulate, scratch=scratch, packed_a=packed_a, n_shares=n_shares,
        rounds=rounds,
    )  # fmt: skip
    multiply = stage(code, f, n_tiles * n_shares)
    if o.packing is not None and o.packing.done:
        return Call(launch, multiply)
    return Call(launch, stage(_pack_task, f, n_groups), multiply)


def _layout(p: Problem) -> Layout:
    packed = Array((packed_size(p.m, p.k),), np.uint16)
    return Layout(packed_a=packed, scratch=per_thread(SCRATCH))


def _may_round(p: Problem) -> bool:
    """Whether W is no float32 matrix, and factors may be rounded to bfloat16 or coarser."""
    return p.form != "strided" and p.weight_type is not F32 and p.compute != "f32"


# Measured: bytes are faster up to 64 tokens forward and up to 24 backward, floats up to 16.
MANY = Path(
    name="amx", takes=_may_round, layout=_layout, bind=_bind, fewest=48, shares=True
)  # fmt: skip
SOME = Path(
    name="amx, few tokens", takes=_may_round, layout=_layout, bind=_bind, fewest=12, shares=True
)
