"""C (m, n) (+)= A (m, R) · B (R, n) with R of at most 16: what LoRA adds to a result.

It is what pyggml.kernels.gemm.beside adds beside a product, alone: C is far larger than A and B,
and a part of it is written while some columns of B, packed as rows, stay near.
"""

from dataclasses import replace

import numpy as np

from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32
from pyggml.jit.frames import Floats1, Int, Switch
from pyggml.jit.scratch import Layout
from pyggml.jit.tasks import launch, of_threads, stage, task_code, whole
from pyggml.kernels.gemm.beside import (
    MR,
    Beside,
    add_thin,
    besides,
    fields_of,
    scratch_of,
    take_columns,
)
from pyggml.kernels.gemm.frames import shares
from pyggml.kernels.gemm.panels import split
from pyggml.kernels.gemm.path import LowRank, Operands, Problem, ProductPath

MOST = 16  # the largest R
COLUMNS = 512  # of a task
PACKING = 24  # rows of C that take as long as packing a task's part of B


class LowRankProduct(Beside):
    """C (m, n) (+)= D · E, and nothing beside it."""

    c: Floats1
    m: Int
    n: Int
    accumulate: Switch
    n_shares: Int  # of C's groups of MR rows


@task_code(LowRankProduct)
def _task(f, task, thread):
    """COLUMNS columns of C, of one share of its rows."""
    first = task // f.n_shares * COLUMNS
    columns = first, min(first + COLUMNS, f.n)
    groups = split((f.m + MR - 1) // MR, f.n_shares, task % f.n_shares)
    take_columns(f, thread, columns)
    add_thin(f, thread, (groups[0] * MR, min(groups[1] * MR, f.m)), columns, f.accumulate)


# -- the path -------------------------------------------------------------------------------------


def _takes(p: Problem) -> bool:
    return p.form != "strided" and p.weight_type is F32 and p.k <= MOST < p.n


def _alone(p: Problem) -> Problem:
    return replace(p, rank=p.k)


def _layout(p: Problem) -> Layout:
    return Layout(**scratch_of(_alone(p), min(p.n, COLUMNS)))


def _bind(p: Problem, o: Operands, **scratch: np.ndarray) -> Call:
    n_tasks = -(-p.n // COLUMNS)
    n_shares = shares(p, MR, n_tasks, len(scratch["spare"]), PACKING)
    f = LowRankProduct(
        c=o.c.reshape(-1), m=p.m, n=p.n, accumulate=o.accumulate, n_shares=n_shares,
        **fields_of(_alone(p), replace(o, beside=LowRank(o.a, o.b)), scratch),
    )  # fmt: skip
    touches = whole(f.values["c"], False), *besides(f), *of_threads(scratch)
    return Call(launch, stage(_task, f, n_tasks * n_shares, *touches))


LOW_RANK = ProductPath(name="low rank", takes=_takes, layout=_layout, bind=_bind)
