"""Products of float32 matrices with any strides, in batches.

strided    c[M, N]  (+)= a[M, K] · b[N, K]ᵀ

Tasks are cut as in pyggml.kernels.gemm.product.
"""

from typing import NamedTuple

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit.frames import Floats1, Floats2, Frame, Int, Switch
from pyggml.jit.scratch import Array, Layout, per_thread
from pyggml.jit.tasks import launch, stage, task_code
from pyggml.kernels.gemm.frames import shares
from pyggml.kernels.gemm.panels import PackedPart, View, Window, multiply_panels, pack_group, split
from pyggml.kernels.gemm.path import Operands, Problem, ProductPath, flat
from pyggml.kernels.gemm.tile import FLOAT_TILE

COLUMNS, DEPTH = 128, 256  # a task's columns of C, and the numbers of k in one of its passes
SHAPE = FLOAT_TILE.shape
MR, PANEL = SHAPE.mr, SHAPE.panel
OF_B = SHAPE._replace(mr=PANEL)  # a panel is packed as a group of so many rows of b


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
    a_repeats: Int  # neighbouring batches of C that use the same batch of A
    b_repeats: Int
    m: Int
    n: Int
    k: Int
    accumulate: Switch
    packed_a: Floats2  # a row for each batch
    n_shares: Int  # of A's groups of MR rows
    # of each thread
    panels: Floats2
    edge: Floats2  # one tile of C


@task_code(StridedProduct)
def _pack_task(f, task, thread):
    """Pack one group of rows of one batch of A."""
    n_groups = (f.m + MR - 1) // MR
    batch, group = task // n_groups, task % n_groups
    start = batch // f.a_repeats * f.a_strides.batch
    view = View(start, f.a_strides.row, f.a_strides.column)
    pack_group(f.packed_a[batch], f.a, view, f.m, f.k, group, SHAPE)


@task_code(StridedProduct)
def _multiply_task(f, task, thread):
    """Multiply: COLUMNS columns of one batch of C, for a share of A's groups of rows."""
    strides, n_tasks = f.b_strides, (f.n + COLUMNS - 1) // COLUMNS * f.n_shares
    batch, rest = task // n_tasks, task % n_tasks
    groups = split((f.m + MR - 1) // MR, f.n_shares, rest % f.n_shares)
    first = rest // f.n_shares * COLUMNS
    n = min(COLUMNS, f.n - first)
    start = batch // f.b_repeats * strides.batch + first * strides.row
    window = Window(batch * f.m * f.n + first, f.n, f.m, n)
    for k0 in range(0, f.k, DEPTH):
        k = min(DEPTH, f.k - k0)
        view = View(start + k0 * strides.column, strides.row, strides.column)
        for panel in range((n + PANEL - 1) // PANEL):
            pack_group(f.panels[thread], f.b, view, n, k, panel, OF_B)
        part, added = PackedPart(f.k, k0, k, groups[0], groups[1]), f.accumulate or k0 > 0
        multiply_panels(
            SHAPE, f.packed_a[batch], part, f.panels[thread], f.edge[thread], f.c, window, added
        )


# -- the path -----------------------------------------------------------------------------------


def _layout(p: Problem) -> Layout:
    return Layout(
        packed_a=Array((p.n_batches, FLOAT_TILE.packed_words(p.m, p.k))),
        panels=per_thread(DEPTH * COLUMNS),
        edge=per_thread(MR * PANEL),
    )


def _strides(a: np.ndarray) -> Strides:
    return Strides(*(s // 4 for s in a.strides))


def _bind(p: Problem, o: Operands, **scratch: np.ndarray) -> Call:
    """Batch i of C takes batch i // a_repeats of A and i // b_repeats of B."""
    n_groups, n_tasks = -(-p.m // MR), -(-p.n // COLUMNS) * p.n_batches
    n_shares = shares(p, MR, n_tasks, len(scratch["panels"]))
    f = StridedProduct(
        c=o.c.reshape(-1), a=flat(o.a), b=flat(o.b), a_strides=_strides(o.a),
        b_strides=_strides(o.b), a_repeats=p.n_batches // len(o.a),
        b_repeats=p.n_batches // len(o.b), m=p.m, n=p.n, k=p.k, accumulate=o.accumulate,
        n_shares=n_shares, **scratch,
    )  # fmt: skip
    pack = stage(_pack_task, f, p.n_batches * n_groups)
    return Call(launch, pack, stage(_multiply_task, f, n_tasks * n_shares))


STRIDED = ProductPath(
    name="strided", takes=lambda p: p.form == "strided", layout=_layout, bind=_bind
)
