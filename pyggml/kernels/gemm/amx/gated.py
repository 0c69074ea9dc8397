"""unit(x · Gᵀ, x · Uᵀ) on tiles: gate and up of a feed-forward part, and the unit of both.

Apart, both products are written, read, and what the unit makes of them is written: twice the bytes
of a prompt's widest results, which no cache keeps. Here a task multiplies the same columns of both
with a group of rows, and takes the unit of them while they are in the first cache. The bits are the
same: a sum runs along all of k, each number of the unit is of one of gate and one of up.
"""

import hashlib
from functools import cache

import numpy as np

from pyggml import threads
from pyggml.formulas.formula import Formula
from pyggml.formulas.text import define
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F32
from pyggml.jit import JIT, Code, kernel
from pyggml.jit.frames import Bool, Floats2, Floats3, Int, Shorts1, Shorts3
from pyggml.jit.scratch import Array, Layout, per_thread
from pyggml.jit.tasks import launch, of_threads, pieces, stage, task_code, whole
from pyggml.kernels.formulas import compiled_loop
from pyggml.kernels.gemm.amx.product import FEWEST_COLUMNS, FORWARD_COLUMNS, FORWARD_DEPTH, MANY
from pyggml.kernels.gemm.amx.rows import (
    COLUMN_WORDS,
    LANES,
    LINE,
    PACKED_ROWS,
    PIECE,
    leading,
    matrix,
    pack_rows,
    packed_size,
    panel_bytes,
    unpack_panels,
)
from pyggml.kernels.gemm.amx.tiles import SIDE, STEP, RowAddress, configure, micro_product, release
from pyggml.kernels.gemm.frames import BlockMatrix, Product, rows_from
from pyggml.kernels.gemm.microkernel import call_unpack
from pyggml.kernels.gemm.path import Operands, Problem, flat
from pyggml.kernels.gemm.teams import Team, columns_of, take_group, team_arrays, teams
from pyggml.sizes import round_up

_NO_FLOATS = np.empty(0, np.float32)
_MOST = FORWARD_COLUMNS * FORWARD_DEPTH  # numbers of both panels: they stay in the second cache


class GatedProduct(Product, Team):
    """Tasks multiply some columns of both Gᵀ, W of a Product, and Uᵀ with groups of SIDE rows."""

    up: BlockMatrix
    unit: Int  # the address of its code
    narrow_c: Shorts1  # C, where it is of bfloat16
    a_is_narrow: Bool
    packed_a: Shorts1
    rounds: Bool
    columns: Int  # of a task
    # of each thread
    rows: Shorts3
    numbers: Floats2
    panels: Shorts3  # of gate, then as many of up
    both: Floats3  # gate, then up: SIDE rows each of a task's columns


@task_code(GatedProduct)
def _pack_task(f, task, thread):
    if task == 0:
        f.taken[:] = 0
    pack_rows(f.packed_a, f.a, f.lda, f.a_is_narrow, f.m, f.k, task, f.numbers[thread])


@kernel
def _multiply(f, thread, g):
    """Gate and up of a group of rows, whole panels."""
    lda, steps = 2 * leading(f.k), (f.k + STEP - 1) // STEP
    a = RowAddress(f.packed_a.ctypes.data + g * SIDE * lda, lda)
    panels, both, n = f.panels[thread], f.both[thread], f.columns // SIDE
    for i in range(2 * n):
        to = both[i // n * SIDE :].ctypes.data + i % n * SIDE * 4
        micro_product(RowAddress(to, both.strides[0]), a, panels[i].ctypes.data, steps, False)


@task_code(GatedProduct)
def _multiply_task(f, task, thread):
    first, last = columns_of(f, task)
    n, panels = f.columns // SIDE, f.panels[thread]
    configure()
    if first < last:
        for w, own in ((f.w, panels[:n]), (f.up, panels[n : 2 * n])):
            unpack_panels(f, thread, own, own, rows_from(w, first), last - first, f.k, False)
        i, g = 0, take_group(f, task, thread, 0, True)
        while g >= 0:
            _multiply(f, thread, g)
            n_rows = min(SIDE, f.m - g * SIDE)
            call_unpack(f, f.unit, thread, g * SIDE * f.n + first, n_rows, last - first, 0)
            i += 1
            g = take_group(f, task, thread, i, True)
    release()


def _unit_text(name: str, loop: str, result: str) -> str:
    """The code that writes n columns of C's rows from `start` on."""
    return (
        f"def {name}(f, thread, start, n_rows, n, _):\n"
        f"    both, result = f.both[thread], f.{result}\n"
        f"    for i in range(n_rows):\n"
        f"        to = result[start + i * f.n : start + i * f.n + n]\n"
        f"        {loop}(to, both[i, :n], both[{SIDE} + i, :n])\n"
    )


@cache
def _unit_code(unit: Formula, is_narrow: bool) -> Code:
    """That of a unit, whose name says what its text is."""
    loop = compiled_loop(unit, (F32, F32), of_results=(BF16,) if is_narrow else (F32,))
    names = {loop.__name__: loop, "__name__": __name__}
    result = "narrow_c" if is_narrow else "c"
    digest = hashlib.sha256(_unit_text("", loop.__name__, result).encode()).hexdigest()[:12]
    name = f"{unit.name}_of_both_{digest}"
    code = define(_unit_text(name, loop.__name__, result), name, names)
    return task_code(GatedProduct, n_integers=5)(code)


# -- what a node of it declares -------------------------------------------------------------------


def takes(p: Problem) -> bool:
    """Whether it computes such products, each of which is p."""
    return JIT and p.form == "mul_mat" and MANY.takes(p) and _most_columns(p) >= SIDE


def _most_columns(p: Problem) -> int:
    return min(FORWARD_COLUMNS, _MOST // (2 * p.k) // SIDE * SIDE)


def _columns(p: Problem) -> int:
    """Columns of a task, of both: threads have equally many, if these are not too narrow."""
    most, n_threads = _most_columns(p), threads.most()
    n_tasks = -(-p.n // (most * n_threads)) * n_threads
    return max(min(most, FEWEST_COLUMNS), round_up(-(-p.n // n_tasks), SIDE))


def layout(p: Problem) -> Layout:
    """Its scratch."""
    most = _most_columns(p)
    return Layout(
        packed_a=Array((packed_size(p.m, p.k),), np.uint16),
        rows=per_thread(LANES, PIECE + LINE // 2, dtype=np.uint16),
        numbers=per_thread(max(PIECE, COLUMN_WORDS)),
        panels=per_thread(2 * most // SIDE, panel_bytes(p.k) // 2, dtype=np.uint16),
        both=per_thread(2 * SIDE, most),
        **team_arrays(-(-p.m // SIDE)),
    )


def call_of(p: Problem, gate: Operands, up: np.ndarray, unit: Formula) -> Call:
    """C (m, n), float32 or bfloat16, of gate's operands and the weight `up`."""
    scratch = layout(p).cut(gate.scratch)
    columns, n_groups, c = _columns(p), -(-p.m // SIDE), gate.c.reshape(-1)
    is_narrow = c.dtype == np.uint16
    team, n_tasks = teams(-(-p.n // columns), n_groups, len(scratch["panels"]))
    (w, rounds), (other, _) = (matrix(b, p.weight_type, p.row, False) for b in (gate.b, up))
    f = GatedProduct(
        c=_NO_FLOATS if is_narrow else c, narrow_c=c.view(np.uint16), a=flat(gate.a), lda=gate.lda,
        w=w, up=other, m=p.m, n=p.n, k=p.k, accumulate=False, a_is_narrow=p.a_is_narrow,
        unit=_unit_code(unit, is_narrow).address, rounds=rounds, columns=columns,
        **(team | scratch),
    )  # fmt: skip
    packed = scratch.pop("packed_a")
    taken, own, each = whole(team["taken"], False), of_threads(scratch), PACKED_ROWS
    a, rows = pieces(f.values["a"], each * gate.lda, True), pieces(packed, each * leading(p.k))
    pack = stage(_pack_task, f, -(-p.m // each), a, rows, taken, *own)
    weights = whole(gate.b), whole(up)
    multiply = stage(
        _multiply_task, f, n_tasks, whole(c, False), *weights, whole(packed), taken, *own
    )
    return Call(launch, pack, multiply)
