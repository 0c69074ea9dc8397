"""Products with a thin matrix of R rows, as in LoRA: too few to fill a register tile's columns.

rows    c[T, R] (+)= x[T, K] · a[R, K]ᵀ    dot products along K; x is read once, as it lies
outer   c[R, K] (+)= g[T, R]ᵀ · x[T, K]    sums over T; or its transpose, c[K, R]

Only the thin matrix is packed, unless it lies so. Arrays are flat float32, with steps in floats.
Each number of c is summed by one task, in an order that depends on the shapes only.
"""

from typing import Any

import numpy as np

from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32
from pyggml.jit import Code, kernel
from pyggml.jit.frames import Bool, Floats1, Floats2, Frame, Int, Switch
from pyggml.jit.scratch import Array, Layout, per_thread
from pyggml.jit.simd import fill
from pyggml.jit.tasks import launch, of_threads, pieces, stage, task_code, whole
from pyggml.kernels.gemm.microkernel import fetch, make_dot_tile, make_tile_product
from pyggml.kernels.gemm.path import Operands, Problem, ProductPath, flat
from pyggml.kernels.gemm.tile import OUTER_TILE, THIN_TILE
from pyggml.sizes import round_up

WIDEST = 16  # the largest R of a thin matrix
ROWS_OF_TASK, ROWS_DEPTH = 16, 512  # `rows`: rows of x in a task, numbers of K in one of its passes
OUTER_COLUMNS = 256  # `outer`: most columns of x in a task; a multiple of the tile's
OUTER_DEPTH = 16  # `outer`: tokens of one pass over its columns
MR, LANES = THIN_TILE.mr, THIN_TILE.lanes  # of `rows`
OUTER_MR, PANEL = OUTER_TILE.mr, OUTER_TILE.panel

outer_product, dot_tile = make_tile_product(OUTER_TILE), make_dot_tile(THIN_TILE)


class ThinProduct(Frame):
    """Both products, summed over `depth`: K of `rows`, T of `outer`."""

    c: Floats1
    thin: Floats1  # the thin matrix: number i of row r is at r * row_step + i * step
    row_step: Int
    step: Int
    n_thin: Int  # R
    depth: Int
    in_groups: Bool  # whether `packed` is (depth, OUTER_MR) for each OUTER_MR rows, else (R, depth)
    packed: Floats1
    x: Floats1
    x_step: Int  # floats from row to row of x
    n_other: Int  # rows of C in `rows`, numbers of its rows in `outer`
    each: Int  # of these, a task's
    accumulate: Switch
    transposed: Bool  # `outer` makes (K, R)
    sums: Floats2  # of each thread: of a tile in `rows`, (R, OUTER_COLUMNS) in `outer`


@task_code(ThinProduct)
def _pack_task(f, task, thread):
    """Pack row r of the thin matrix: of (R, depth), or of groups; past R, zeros."""
    a, row_step, step, inside = f.thin, f.row_step, f.step, task < f.n_thin
    lane, apart = (task % OUTER_MR, OUTER_MR) if f.in_groups else (0, 1)
    to = f.packed[(task - lane) * f.depth + lane :]
    for i in range(f.depth):
        to[i * apart] = a[task * row_step + i * step] if inside else np.float32(0)


@task_code(ThinProduct)
def _rows_task(f, task, thread):
    """Compute ROWS_OF_TASK rows of c."""
    c, packed, x, x_step = f.c, f.packed, f.x, f.x_step
    n_thin, depth = f.n_thin, f.depth
    sums = f.sums[thread]
    to = sums.ctypes.data
    last = min(f.n_other, (task + 1) * ROWS_OF_TASK)
    if not f.accumulate:
        fill(c[task * ROWS_OF_TASK * n_thin : last * n_thin], np.float32(0))
    for k0 in range(0, depth, ROWS_DEPTH):
        k = min(ROWS_DEPTH, depth - k0)
        whole = k // LANES * LANES
        for t in range(task * ROWS_OF_TASK, last, MR):
            n = min(MR, last - t)
            for i in range(t + MR, min(t + 2 * MR, last)):
                fetch(x.ctypes.data + (i * x_step + k0) * 4, 4 * k)
            for r in range(0, n_thin, MR):
                a = packed[r * depth + k0 :]
                for i in range(0, n, MR if n == MR else 1):
                    here = x.ctypes.data + ((t + i) * x_step + k0) * 4
                    dot_tile(n == MR, to + i * MR * 4, here, x_step, a.ctypes.data, depth, whole)
                for i in range(n):
                    of = x[(t + i) * x_step + k0 :]
                    _add_sums(c[(t + i) * n_thin + r :], sums[i * MR :], of, a, depth, whole, k,
                              min(MR, n_thin - r))  # fmt: skip


@kernel
def _add_sums(c, sums, x, a, depth, whole, k, n):
    """c[j] += sums[j] and the rest of the dot product after its whole vectors."""
    for j in range(n):
        rest = sums[j]
        for i in range(whole, k):
            rest += x[i] * a[j * depth + i]
        c[j] += rest


@task_code(ThinProduct)
def _outer_task(f, task, thread):
    """Compute a task's columns of c, or rows of its transpose."""
    c, packed, x, x_step = f.c, f.packed, f.x, f.x_step
    n_thin, depth, n_columns = f.n_thin, f.depth, f.n_other
    accumulate, transposed = f.accumulate, f.transposed
    sums = f.sums[thread]
    first = task * f.each
    n = min(f.each, n_columns - first)
    whole = n // PANEL * PANEL
    fill(sums, np.float32(0))
    if accumulate and transposed:
        fetch(c.ctypes.data + first * n_thin * 4, 4 * n * n_thin)
    elif accumulate:
        for i in range(n_thin):
            fetch(c.ctypes.data + (i * n_columns + first) * 4, 4 * n)
    for t in range(0, depth, OUTER_DEPTH):
        k = min(OUTER_DEPTH, depth - t)
        b = x.ctypes.data + (t * x_step + first) * 4
        for j in range(0, whole, PANEL):
            for i in range(OUTER_DEPTH, OUTER_DEPTH + min(OUTER_DEPTH, depth - t - k)):
                fetch(b + (i * x_step + j) * 4, 4 * PANEL)  # the next pass's: few lines at a time
            for r in range(0, n_thin, OUTER_MR):
                group, c_tile = packed[r * depth + t * OUTER_MR :], sums[r * OUTER_COLUMNS + j :]
                outer_product(group.ctypes.data, b + j * 4, x_step, c_tile.ctypes.data,
                             OUTER_COLUMNS, k, 1)  # fmt: skip
        for r in range(0, n_thin, OUTER_MR):
            group, to = packed[r * depth + t * OUTER_MR :], sums[r * OUTER_COLUMNS :]
            for i in range(k):
                for j in range(whole, n):
                    number = x[(t + i) * x_step + first + j]
                    for lane in range(OUTER_MR):
                        to[lane * OUTER_COLUMNS + j] += group[i * OUTER_MR + lane] * number
    for i in range(n_thin):
        row = sums[i * OUTER_COLUMNS : i * OUTER_COLUMNS + n]
        start = first * n_thin + i if transposed else i * n_columns + first
        step = n_thin if transposed else 1
        for j in range(n):
            c[start + j * step] = row[j] + (c[start + j * step] if accumulate else np.float32(0))


# -- the paths ------------------------------------------------------------------------------------


def _dots_layout(p: Problem) -> Layout:
    return Layout(packed=Array((round_up(p.n, MR) * p.k,)), sums=per_thread(MR * MR))


def _outer_layout(n_thin: int, depth: int) -> Layout:
    n = round_up(n_thin, OUTER_MR)
    return Layout(packed=Array((n * depth,)), sums=per_thread(n * OUTER_COLUMNS))


def _takes_weight(p: Problem) -> bool:
    """Whether this is a float32 matrix whose products have few columns."""
    return p.form != "strided" and p.weight_type is F32 and p.n <= WIDEST


def _bind_dots(p: Problem, o: Operands, packed: np.ndarray, sums: np.ndarray) -> Call:
    """C (m, n) (+)= A (m, k) · B, with few columns n."""
    thin = o.b if p.form == "mul_mat" else o.b.T  # (n, k)
    return _call(
        _rows_task, (p.m, ROWS_OF_TASK), thin, packed, in_groups=False, c=o.c.reshape(-1),
        depth=p.k, x=flat(o.a), x_step=o.lda, accumulate=o.accumulate, transposed=False, sums=sums,
    )  # fmt: skip


def _call(
    task: Code, cut: tuple[int, int], thin: np.ndarray, packed: np.ndarray, in_groups: bool,
    **fields: Any,
) -> Call:  # fmt: skip
    """The stages of a product with a thin matrix (R, depth). It is not packed if it lies so, as an
    adapter's A does, and what a gradient is made of where R fills a tile. cut: n_other, each."""
    n_rows = round_up(len(thin), OUTER_MR if in_groups else MR)
    if in_groups:
        lies_so = len(thin) == OUTER_MR and thin.T.flags.c_contiguous
    else:
        lies_so = len(thin) == n_rows and thin.flags.c_contiguous
    lies, packed = flat(thin), flat(thin) if lies_so else packed
    f = ThinProduct(
        thin=lies, row_step=thin.strides[0] // 4, step=thin.strides[1] // 4, n_thin=len(thin),
        in_groups=in_groups, packed=packed, n_other=cut[0], each=cut[1], **fields,
    )  # fmt: skip
    c, x, depth = fields["c"], fields["x"], fields["x_step"]
    pack = [] if lies_so else [stage(_pack_task, f, n_rows, whole(lies), whole(packed, False))]
    if task is _rows_task:
        own = pieces(c, cut[1] * len(thin)), pieces(x, cut[1] * depth, True)
    else:
        own = whole(c, False), whole(x)
    sums = of_threads({"sums": fields["sums"]})
    return Call(launch, *pack, stage(task, f, -(-cut[0] // cut[1]), *own, whole(packed), *sums))


def _is_one_batch(p: Problem) -> bool:
    return p.form == "strided" and p.n_batches == 1


def _bind_outer(p: Problem, o: Operands, packed: np.ndarray, sums: np.ndarray) -> Call:
    """C (m, n) (+)= A · Bᵀ, with a thin A (m, k) and a B (n, k) that lies column by column."""
    return _outer(p, o, o.a[0], o.b[0], packed, sums, transposed=False)


def _bind_transposed(p: Problem, o: Operands, packed: np.ndarray, sums: np.ndarray) -> Call:
    """The same with a thin B, and an A that lies column by column."""
    return _outer(p, o, o.b[0], o.a[0], packed, sums, transposed=True)


def _outer(
    p: Problem, o: Operands, thin: np.ndarray, other: np.ndarray, packed: np.ndarray,
    sums: np.ndarray, transposed: bool,
) -> Call:  # fmt: skip
    """C (+)= thin (R, k) · other (N, k)ᵀ, or its transpose; each thread has columns."""
    each = min(OUTER_COLUMNS, round_up(-(-len(other) // len(sums)), PANEL))
    return _call(
        _outer_task, (len(other), each), thin, packed, in_groups=True, c=o.c.reshape(-1),
        depth=p.k, x=flat(other), x_step=other.strides[1] // 4, accumulate=o.accumulate,
        transposed=transposed, sums=sums,
    )  # fmt: skip


DOTS = ProductPath(name="thin", takes=_takes_weight, layout=_dots_layout, bind=_bind_dots)
OUTER = ProductPath(
    name="thin outer",
    takes=lambda p: _is_one_batch(p) and p.b_in_columns,
    layout=lambda p: _outer_layout(p.m, p.k),
    bind=_bind_outer,
    most=WIDEST,
)
OUTER_TRANSPOSED = ProductPath(
    name="thin outer, transposed",
    takes=lambda p: _is_one_batch(p) and p.a_in_columns and p.n <= WIDEST,
    layout=lambda p: _outer_layout(p.n, p.k),
    bind=_bind_transposed,
)
