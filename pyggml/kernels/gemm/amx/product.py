"""Products with a weight on tiles: C (m, n) (+)= A (m, k) · B (k, n), factors rounded to bfloat16.

forward    y  = x · Wᵀ     16 rows of W at a time: their pairs are transposed into B's tiles
backward   dx = dy · W     two rows of W at a time: they are shuffled into B's pairs

A is rounded once, row by row, as tiles take it, also where it lies in columns (dW = dyᵀ · x). A
task unpacks some columns of B, a part of k at a time, and multiplies with them those groups of rows
that its team has left (pyggml.kernels.gemm.teams). Every sum runs in an order that depends on the
shapes only, so that threads do not change it.
"""

import numpy as np

from pyggml import threads
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32
from pyggml.jit import Code, kernel
from pyggml.jit.frames import Bool, Floats2, Floats3, Int, Shorts1, Shorts3
from pyggml.jit.scratch import Array, Layout, per_thread
from pyggml.jit.tasks import launch, of_threads, pieces, stage, task_code, whole
from pyggml.kernels.gemm.amx.rows import (
    COLUMN_WORDS,
    LANES,
    LINE,
    PACKED_ROWS,
    PIECE,
    leading,
    matrix,
    pack_columns,
    pack_narrow_columns,
    pack_rows,
    packed_size,
    panel_bytes,
    put_pairs,
    unpack_panels,
    unpack_rows,
)
from pyggml.kernels.gemm.amx.tiles import (
    SIDE,
    STEP,
    RowAddress,
    configure,
    micro_product,
    release,
    rows_of,
)
from pyggml.kernels.gemm.beside import (
    Beside,
    begin,
    besides,
    fields_of,
    finish,
    scratch_of,
    take_columns,
)
from pyggml.kernels.gemm.frames import Product, columns_from, rows_from
from pyggml.kernels.gemm.panels import rounded_up
from pyggml.kernels.gemm.path import Operands, Problem, ProductPath, flat
from pyggml.kernels.gemm.teams import Team, columns_of, take_group, team_arrays, teams
from pyggml.sizes import round_up

# Columns of a task, forward at most, and numbers of k in one of its passes: so much of B stays in
# the second cache. C is read and written once a pass. Backward, columns are a multiple of every
# block length, as are the pieces of W's rows that are unpacked at a time.
FORWARD_COLUMNS, FORWARD_DEPTH = 128, 3072
BACKWARD_COLUMNS, BACKWARD_DEPTH = 256, 1536
FEWEST_COLUMNS = 64  # each task reads all of its rows of A


class TileProduct(Product, Team, Beside):
    """Tasks multiply some columns of B with groups of SIDE rows of A."""

    a_in_columns: Bool
    a_is_narrow: Bool
    packed_a: Shorts1  # rows of bfloat16
    rounds: Bool  # whether W's unpacker writes bfloat16
    columns: Int  # of a task
    # of each thread
    rows: Shorts3  # of W, as bfloat16
    numbers: Floats2
    panels: Shorts3
    edge: Floats3  # a square of C


@task_code(TileProduct)
def _pack_task(f, task, thread):
    """PACKED_ROWS rows of A, or SIDE that lie in columns; the first ones let teams begin."""
    if task == 0:
        f.taken[:] = 0
    if f.a_in_columns and f.a_is_narrow:
        shorts, spare = f.a.view(np.uint16), f.numbers[thread]
        pack_narrow_columns(f.packed_a, shorts, f.lda, f.m, f.k, task, spare)
    elif f.a_in_columns:
        pack_columns(f.packed_a, f.a, f.lda, f.m, f.k, task, f.numbers[thread])
    else:
        spare = f.numbers[thread]
        pack_rows(f.packed_a, f.a, f.lda, f.a_is_narrow, f.m, f.k, task, spare)


@task_code(TileProduct)
def _begin_task(f, task, thread):
    """The same where A is packed."""
    f.taken[:] = 0


# -- B's panels -----------------------------------------------------------------------------------


@kernel
def _paired_panels(f, thread, w, n_rows, n_columns):
    """B = n_columns of W from n_rows rows."""
    two = f.rows[thread, :2]
    for i in range(0, rounded_up(n_rows, STEP), 2):
        unpack_rows(two, w, i, n_rows, n_columns, f.rounds, f.numbers[thread])
        put_pairs(f.panels[thread], i, two[0], two[1], rounded_up(n_columns, SIDE))


# -- multiplying ----------------------------------------------------------------------------------


@kernel
def _multiply(f, task, thread, columns, k0, k):
    """C[:, columns] (+)= A[:, k0 : k0 + k] · B, for the groups of SIDE rows that the task gets."""
    c, lda, steps = f.c, 2 * leading(f.k), (k + STEP - 1) // STEP
    panels, edge = f.panels[thread], f.edge[thread]
    added = f.accumulate or f.begins or k0 > 0
    if k0 == 0:
        take_columns(f, thread, columns)
    i, g = 0, take_group(f, task, thread, 0, k0 == 0)
    while g >= 0:
        a = RowAddress(f.packed_a.ctypes.data + g * SIDE * lda + 2 * k0, lda)
        n_rows = min(SIDE, f.m - g * SIDE)
        rows = g * SIDE, g * SIDE + n_rows
        if k0 == 0:
            begin(f, thread, rows, columns)
        for column in range(columns[0], columns[1], SIDE):
            b = panels[(column - columns[0]) // SIDE].ctypes.data
            start, n = g * SIDE * f.n + column, min(SIDE, columns[1] - column)
            if n_rows == SIDE and n == SIDE:
                micro_product(RowAddress(c[start:].ctypes.data, 4 * f.n), a, b, steps, added)
            else:
                micro_product(rows_of(edge), a, b, steps, False)
                _put_edge(c, start, f.n, edge, n_rows, n, added)
        if k0 + k == f.k:
            finish(f, thread, rows, columns)
        i += 1
        g = take_group(f, task, thread, i, k0 == 0)


@kernel
def _put_edge(c, start, ldc, edge, n_rows, n_columns, added):
    """Write or add the part of a square of C, `edge`, that lies inside C."""
    for i in range(n_rows):
        to = c[start + i * ldc : start + i * ldc + n_columns]
        for j in range(n_columns):
            to[j] = edge[i, j] + (to[j] if added else np.float32(0))


@task_code(TileProduct)
def _forward_task(f, task, thread):
    columns = columns_of(f, task)
    here, n = rows_from(f.w, columns[0]), columns[1] - columns[0]
    configure()
    for k0 in range(0, f.k if n else 0, FORWARD_DEPTH):
        k = min(FORWARD_DEPTH, f.k - k0)
        panels = f.panels[thread]
        unpack_panels(f, thread, panels, panels, columns_from(here, k0), n, k, False)
        _multiply(f, task, thread, columns, k0, k)
    release()


@task_code(TileProduct)
def _backward_task(f, task, thread):
    columns = columns_of(f, task)
    here, n = columns_from(f.w, columns[0]), columns[1] - columns[0]
    configure()
    for k0 in range(0, f.k if n else 0, BACKWARD_DEPTH):
        k = min(BACKWARD_DEPTH, f.k - k0)
        _paired_panels(f, thread, rows_from(here, k0), k, n)
        _multiply(f, task, thread, columns, k0, k)
    release()


# -- the paths ------------------------------------------------------------------------------------


def _bind(p: Problem, o: Operands, **scratch: np.ndarray) -> Call:
    columns, _, code = _cut(p)
    n_groups = -(-p.m // SIDE)
    team, n_tasks = teams(-(-p.n // columns), n_groups, len(scratch["panels"]))
    w, rounds = matrix(o.b, p.weight_type, p.row, p.rounds_w)
    lda = o.a.strides[1] // 4 if p.a_in_columns else o.lda
    f = TileProduct(
        c=o.c.reshape(-1), a=flat(o.a), lda=lda, w=w, m=p.m, n=p.n, k=p.k,
        accumulate=o.accumulate, a_in_columns=p.a_in_columns, a_is_narrow=p.a_is_narrow,
        rounds=rounds, columns=columns,
        **team, **fields_of(p, o, scratch),
    )  # fmt: skip
    packed = scratch.pop("packed_a")
    taken, own = whole(team["taken"], False), of_threads(scratch)
    c = whole(f.values["c"], False)
    multiply = stage(code, f, n_tasks, c, whole(o.b), whole(packed), *besides(f), taken, *own)
    if o.packing is not None and o.packing.done:
        return Call(launch, stage(_begin_task, f, 1, taken), multiply)
    each = SIDE if p.a_in_columns else PACKED_ROWS
    a, rows = f.values["a"], pieces(packed, each * leading(p.k))
    a = whole(a) if p.a_in_columns else pieces(a, each * lda, True)
    return Call(launch, stage(_pack_task, f, -(-p.m // each), a, rows, taken, *own), multiply)


def _cut(p: Problem) -> tuple[int, int, Code]:
    """Columns of a task, depth of its passes, and its code. Forward, threads have equally many
    tasks, if these are not too narrow: all of a team unpack the same weights."""
    if p.form != "mul_mat":
        return BACKWARD_COLUMNS, BACKWARD_DEPTH, _backward_task
    n_threads = threads.most()
    n_tasks = -(-p.n // (FORWARD_COLUMNS * n_threads)) * n_threads
    columns = max(FEWEST_COLUMNS, round_up(-(-p.n // n_tasks), SIDE))
    return columns, FORWARD_DEPTH, _forward_task


def _layout(p: Problem) -> Layout:
    """Scratch, which does not depend on how wide tasks are: products of the same A share it."""
    depth = _cut(p)[1]
    columns = FORWARD_COLUMNS if p.form == "mul_mat" else BACKWARD_COLUMNS
    return Layout(
        packed_a=Array((packed_size(p.m, p.k),), np.uint16),
        rows=per_thread(LANES, PIECE + LINE // 2, dtype=np.uint16),
        numbers=per_thread(max(PIECE, COLUMN_WORDS)),
        panels=per_thread(columns // SIDE, panel_bytes(depth) // 2, dtype=np.uint16),
        edge=per_thread(SIDE, SIDE),
        **team_arrays(-(-p.m // SIDE)),
        **scratch_of(p, columns),
    )


def _may_round(p: Problem) -> bool:
    """Whether W is no float32 matrix that stays one, and factors may be rounded to bfloat16 or
    coarser."""
    may = p.weight_type is not F32 or p.rounds_w
    return p.form != "strided" and may and p.compute != "f32"


# Measured: bytes are faster up to 64 tokens forward and up to 24 backward, floats up to 16.
MANY = ProductPath(
    name="amx", takes=_may_round, layout=_layout, bind=_bind, fewest=48, shares=True, joins=True,
    narrow=True,
)  # fmt: skip
SOME = ProductPath(
    name="amx, few tokens", takes=_may_round, layout=_layout, bind=_bind, fewest=12, shares=True,
    joins=True, narrow=True,
)  # fmt: skip
