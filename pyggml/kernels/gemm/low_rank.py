"""C (m, n) (+)= A (m, R) · B (R, n) with R of at most 16: what LoRA adds to a result.

C is far larger than A and B, and each of its numbers is met once. So a task takes whole rows of C,
and B, packed as rows, stays near. A sum runs along R and is then added to C, as in
pyggml.kernels.gemm.product: the bits are the same.
"""

import numpy as np

from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32
from pyggml.jit import kernel
from pyggml.jit.frames import Bool, Floats1, Floats2, Frame, Int
from pyggml.jit.scratch import Array, Layout, per_thread
from pyggml.jit.tasks import launch, stage, task_code
from pyggml.kernels.gemm.microkernel import make_tile_product
from pyggml.kernels.gemm.panels import add_edge
from pyggml.kernels.gemm.path import Operands, Problem, ProductPath, flat
from pyggml.kernels.gemm.tile import THIN_TILE
from pyggml.sizes import round_up

MOST = 16  # the largest R
ROWS_OF_TASK = 16  # rows of C in a task, a multiple of the tile's
COLUMNS = 1024  # met by all rows of a task before the next ones; a multiple of the tile's
MR, PANEL = THIN_TILE.mr, THIN_TILE.panel

thin_product = make_tile_product(THIN_TILE)


class LowRankProduct(Frame):
    """B's number j of row r is at r * row_step + j * step."""

    c: Floats1
    a: Floats1
    lda: Int
    b: Floats1
    row_step: Int
    step: Int
    m: Int
    n: Int
    k: Int  # R
    accumulate: Bool
    packed_b: Floats2  # (R, n in whole panels)
    # of each thread
    group: Floats2  # MR rows of A, interleaved as (R, MR)
    edge: Floats2  # a tile of C


@task_code(LowRankProduct)
def _pack_task(f, r, thread):
    """Row r of B, with zeros up to a whole panel."""
    row, start = f.packed_b[r], r * f.row_step
    for j in range(f.n):
        row[j] = f.b[start + j * f.step]
    for j in range(f.n, row.shape[0]):
        row[j] = np.float32(0)


@kernel
def _interleave(group, f, first, n_rows):
    """Rows `first` … of A as (R, MR); zeros from row n_rows on."""
    for i in range(MR):
        for r in range(f.k):
            group[r * MR + i] = f.a[(first + i) * f.lda + r] if i < n_rows else np.float32(0)


@task_code(LowRankProduct)
def _rows_task(f, task, thread):
    """ROWS_OF_TASK rows of C."""
    c, n, k, ldb = f.c, f.n, f.k, f.packed_b.shape[1]
    group, edge = f.group[thread], f.edge[thread]
    a, to, of = group.ctypes.data, c.ctypes.data, f.packed_b.ctypes.data
    last = min(f.m, (task + 1) * ROWS_OF_TASK)
    for column in range(0, n, COLUMNS):
        for i in range(task * ROWS_OF_TASK, last, MR):
            n_rows = min(MR, last - i)
            _interleave(group, f, i, n_rows)
            for j in range(column, min(column + COLUMNS, n), PANEL):
                start, n_columns = i * n + j, min(PANEL, n - j)
                if n_rows == MR and n_columns == PANEL:
                    thin_product(a, of + 4 * j, ldb, to + 4 * start, n, k, f.accumulate)
                else:
                    thin_product(a, of + 4 * j, ldb, edge.ctypes.data, PANEL, k, 0)
                    add_edge(c, start, n, edge, PANEL, n_rows, n_columns, f.accumulate)


# -- the path -------------------------------------------------------------------------------------


def _takes(p: Problem) -> bool:
    return p.form != "strided" and p.weight_type is F32 and p.k <= MOST < p.n


def _layout(p: Problem) -> Layout:
    return Layout(
        packed_b=Array((p.k, round_up(p.n, PANEL))),
        group=per_thread(p.k * MR),
        edge=per_thread(MR * PANEL),
    )


def _bind(p: Problem, o: Operands, **scratch: np.ndarray) -> Call:
    b = o.b.T if p.form == "mul_mat" else o.b  # (R, n)
    f = LowRankProduct(
        c=o.c.reshape(-1), a=flat(o.a), lda=o.lda, b=flat(b), row_step=b.strides[0] // 4,
        step=b.strides[1] // 4, m=p.m, n=p.n, k=p.k, accumulate=o.accumulate, **scratch,
    )  # fmt: skip
    return Call(launch, stage(_pack_task, f, p.k), stage(_rows_task, f, -(-p.m // ROWS_OF_TASK)))


LOW_RANK = ProductPath(name="low rank", takes=_takes, layout=_layout, bind=_bind)
