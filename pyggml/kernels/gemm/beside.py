"""A product of low rank beside one with a weight, and C as bfloat16: C (+)= A · B + D · E.

LoRA adds one to nearly every product. D (m, R) and E (R, n) are small, C is large. So a task adds
its part of D · E to its part of C while that is in the caches: C is not read and written once more
for it, nor read once more to be rounded.

forward    y  = x · Wᵀ + t · Bᵀ    D · E is added to the finished sums
backward   dx = s · A + dy · W     D · E is there before the first sum

In this order products one after the other would add them: the bits are the same. A sum runs along
R and is then added to C.
"""

from typing import Any

import numpy as np

from pyggml.jit import kernel
from pyggml.jit.frames import Bool, Floats1, Floats2, Floats3, Frame, Int, Shorts1
from pyggml.jit.scratch import Array, Scratch, per_thread
from pyggml.jit.tasks import Extent, whole
from pyggml.kernels.gemm.microkernel import make_strided_product
from pyggml.kernels.gemm.panels import add_edge, rounded_up
from pyggml.kernels.gemm.path import Operands, Problem, flat
from pyggml.kernels.gemm.tile import BESIDE_TILE
from pyggml.quants.bits import float_to_bf16
from pyggml.sizes import round_up

MOST = 64  # the largest R that graphs join: E's columns of a task stay in the second cache
MR, PANEL = BESIDE_TILE.mr, BESIDE_TILE.panel

thin_product = make_strided_product(BESIDE_TILE)


class Beside(Frame):
    """What is added beside a product: of the frames of paths that do this."""

    d: Floats1
    ldd: Int
    e: Floats1  # number j of row r is at r * e_row + j * e_step
    e_row: Int
    e_step: Int
    rank: Int  # R; 0 if nothing is added
    begins: Bool  # whether C begins with D · E
    rounded: Shorts1  # C as bfloat16; empty if nobody wants it
    # of each thread
    e_panel: Floats3  # (R, columns of a task)
    spare: Floats2  # MR rows of D and a tile of C


# -- kernels --------------------------------------------------------------------------------------


@kernel
def take_columns(f, thread, columns):
    """Pack E's columns of a task; columns: the first, and the one past the last."""
    panel, n = f.e_panel[thread], columns[1] - columns[0]
    for r in range(f.rank):
        row, start = panel[r], r * f.e_row + columns[0] * f.e_step
        for j in range(n):
            row[j] = f.e[start + j * f.e_step]
        for j in range(n, rounded_up(n, PANEL)):
            row[j] = np.float32(0)


@kernel
def begin(f, thread, rows, columns):
    """What a part of C needs before its first sum; rows, columns: first, past the last."""
    if f.begins:
        add_thin(f, thread, rows, columns, f.accumulate)


@kernel
def finish(f, thread, rows, columns):
    """The same after its last sum."""
    if f.rank > 0 and not f.begins:
        add_thin(f, thread, rows, columns, True)
    if f.rounded.size > 0:
        for i in range(rows[0], rows[1]):
            first, last = i * f.n + columns[0], i * f.n + columns[1]
            round_all(f.rounded[first:last], f.c[first:last])


@kernel
def add_thin(f, thread, rows, columns, accumulate):
    """A part of C (+)= that of D · E."""
    c, n, k, d, ldd = f.c, f.n, f.rank, f.d, f.ldd
    panel, spare = f.e_panel[thread], f.spare[thread]
    lde, of, edge = panel.shape[1], panel.ctypes.data, spare[MR * k :]
    for i in range(rows[0], rows[1], MR):
        n_rows, at, step = min(MR, rows[1] - i), d.ctypes.data + 4 * i * ldd, ldd
        if n_rows < MR:
            _copy_rows(spare, d, i * ldd, ldd, n_rows, k)
            at, step = spare.ctypes.data, k
        for j in range(columns[0], columns[1], PANEL):
            n_columns, start, b = min(PANEL, columns[1] - j), i * n + j, of + 4 * (j - columns[0])
            if n_rows == MR and n_columns == PANEL:
                to = c.ctypes.data + 4 * start
                thin_product(at, step, 1, b, lde, to, n, k, accumulate)
            else:
                thin_product(at, step, 1, b, lde, edge.ctypes.data, PANEL, k, 0)
                add_edge(c, start, n, edge, PANEL, n_rows, n_columns, accumulate)


@kernel
def _copy_rows(to, d, start, ldd, n_rows, k):
    """MR rows of k numbers of D; zeros from row n_rows on."""
    for i in range(MR):
        for r in range(k):
            to[i * k + r] = d[start + i * ldd + r] if i < n_rows else np.float32(0)


@kernel
def round_all(to, of):
    """to = of as bfloat16."""
    for i in range(of.size):
        to[i] = float_to_bf16(of[i])


# -- what a path declares -------------------------------------------------------------------------

_NOTHING, _NOT_ROUNDED = np.empty(0, np.float32), np.empty(0, np.uint16)


def scratch_of(p: Problem, columns: int) -> dict[str, Array]:
    """Beside's arrays of a path's layout; columns: those of a task."""
    return {
        "e_panel": per_thread(p.rank, round_up(columns, PANEL)),
        "spare": per_thread(MR * (p.rank + PANEL)),
    }


def fields_of(p: Problem, o: Operands, scratch: Scratch) -> dict[str, Any]:
    """The fields of a path's frame that are Beside's or scratch."""
    if o.beside is None:
        return dict(
            d=_NOTHING, ldd=0, e=_NOTHING, e_row=0, e_step=0, rank=0, begins=False,
            rounded=_NOT_ROUNDED, **scratch,
        )  # fmt: skip
    d, thin, rounded = o.beside
    e = thin.T if p.form == "mul_mat" else thin  # (R, n)
    return dict(
        d=flat(d), ldd=d.strides[0] // 4, e=flat(e), e_row=e.strides[0] // 4,
        e_step=e.strides[1] // 4, rank=p.rank, begins=p.form == "out_prod",
        rounded=_NOT_ROUNDED if rounded is None else rounded.reshape(-1), **scratch,
    )  # fmt: skip


def besides(f: Beside) -> list[Extent]:
    """The memory of these fields that tasks touch, without scratch."""
    parts = [whole(f.values["d"]), whole(f.values["e"]), whole(f.values["rounded"], False)]
    return [part for part in parts if part.n_bytes]
