"""The product of two float32 matrices with any strides, in batches: what the weights' is not.

strided    c[M, N]  (+)= a[M, K] · b[N, K]ᵀ

Blocked as pyggml.gemm.product; here the panels are gathered from b's rows or columns.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pyggml._frames import Bool, Floats1, Floats2, Frame, Int
from pyggml._jit import kernel
from pyggml._tasks import launch, stage, task_code
from pyggml.call import Call
from pyggml.gemm.frames import shares
from pyggml.gemm.panels import DEPTH, MR, PANEL, TILE, multiply_panel, pack_group, split
from pyggml.gemm.path import Operands, Path, Problem, flat
from pyggml.scratch import Array, Layout, per_thread
from pyggml.sizes import round_up

TILE_FLOATS = DEPTH * TILE  # of one tile in panels; an edge of c follows it in a thread's scratch


class Strides(NamedTuple):
    """Floats from batch to batch, row to row and column to column."""

    batch: int
    row: int
    column: int


class StridedProduct(Frame):
    """C (m, n) (+)= A (m, k) · B (n, k)ᵀ for every batch."""

    c: Floats1
    a: Floats1
    b: Floats1
    a_strides: Strides
    b_strides: Strides
    a_repeats: Int  # neighbouring batches of C that meet the same batch of A
    b_repeats: Int
    m: Int
    n: Int
    k: Int
    accumulate: Bool
    packed_a: Floats2  # a row for each batch
    scratch: Floats2  # a row for each thread
    n_shares: Int  # of A's groups of MR rows


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


@task_code(StridedProduct)
def _pack_task(f, task, thread):
    """One group of rows of one batch of A."""
    n_groups = (f.m + MR - 1) // MR
    batch, group = task // n_groups, task % n_groups
    start = batch // f.a_repeats * f.a_strides.batch
    rows, columns = f.a_strides.row, f.a_strides.column
    pack_group(f.packed_a[batch], f.a, start, rows, columns, f.m, f.k, group)


@task_code(StridedProduct)
def _multiply_task(f, task, thread):
    """One tile of one batch of B with a share of A's rows."""
    c, b, accumulate = f.c, f.b, f.accumulate
    row_step, column_step = f.b_strides.row, f.b_strides.column
    n_tiles = (f.n + TILE - 1) // TILE
    batch, rest = task // (n_tiles * f.n_shares), task % (n_tiles * f.n_shares)
    mine = f.scratch[thread]
    tile, edge = mine[:TILE_FLOATS], mine[TILE_FLOATS:]
    groups = split((f.m + MR - 1) // MR, f.n_shares, rest % f.n_shares)
    first = rest // f.n_shares * TILE
    n = min(TILE, f.n - first)
    start = batch // f.b_repeats * f.b_strides.batch + first * row_step
    for k0 in range(0, f.k, DEPTH):
        k = min(DEPTH, f.k - k0)
        _gather_tile(tile, b, start + k0 * column_step, row_step, column_step, n, k)
        for column in range(0, n, PANEL):
            multiply_panel(
                f.packed_a[batch], f.k, k0, k, False, groups,
                tile.ctypes.data + column * k * 4, edge, c, batch * f.m * f.n + first + column,
                f.n, f.m, min(PANEL, n - column), accumulate or k0 > 0,
            )  # fmt: skip


# -- the path -----------------------------------------------------------------------------------


def _layout(p: Problem) -> Layout:
    packed = round_up(p.m, MR) * p.k
    scratch = TILE_FLOATS + MR * PANEL
    return Layout(packed_a=Array((p.n_batches, packed)), scratch=per_thread(scratch))


def _strides(a: np.ndarray) -> Strides:
    return Strides(*(s // 4 for s in a.strides))


def _bind(p: Problem, o: Operands, packed_a: np.ndarray, scratch: np.ndarray) -> Call:
    """Batch i of C takes batch i // a_repeats of A and i // b_repeats of B."""
    n_groups, n_tiles = -(-p.m // MR), -(-p.n // TILE)
    n_shares = shares(p.m, n_tiles * p.n_batches, len(scratch))
    f = StridedProduct(
        c=o.c.reshape(-1), a=flat(o.a), b=flat(o.b), a_strides=_strides(o.a),
        b_strides=_strides(o.b), a_repeats=p.n_batches // len(o.a),
        b_repeats=p.n_batches // len(o.b), m=p.m, n=p.n, k=p.k, accumulate=o.accumulate,
        packed_a=packed_a, scratch=scratch, n_shares=n_shares,
    )  # fmt: skip
    pack = stage(_pack_task, f, p.n_batches * n_groups)
    return Call(launch, pack, stage(_multiply_task, f, p.n_batches * n_tiles * n_shares))


STRIDED = Path(name="strided", takes=lambda p: p.form == "strided", layout=_layout, bind=_bind)
