"""y[T, N] (+)= x[T, K] · W[N, K]ᵀ for several tokens, as when several texts are written at once.

As in pyggml.gemm.few, each number is one dot product with a row of W as it lies and x in bytes. A
row's blocks are decoded once for TOGETHER tokens, and each token gets the very sum that it gets
alone. From some number of tokens on it pays to unpack the rows for a tile (pyggml.gemm.int8).
"""

from __future__ import annotations

import numpy as np

from pyggml._frames import Floats2
from pyggml._jit import Code
from pyggml._tasks import launch, stage, task_code
from pyggml.call import Call
from pyggml.gemm import int8
from pyggml.gemm.activations import BLOCK_SLOTS, quantize
from pyggml.gemm.dots import TOGETHER, kind_of_rows, row_dots_ints
from pyggml.gemm.frames import Product, block_matrix
from pyggml.gemm.path import Operands, Path, Problem, flat
from pyggml.quants.layout import GROUP
from pyggml.quants.unpack import INTEGER_TYPES, LAYOUTS
from pyggml.scratch import Layout, per_thread

MOST = 2 * TOGETHER  # tokens, measured
ROWS = 64  # weight rows of one task
_TOKEN_SLOTS = 2 * BLOCK_SLOTS + 2  # that `quantize` writes for each block of a token


class SeveralProduct(Product):
    """A product of several tokens. A task takes ROWS rows of W."""

    # of each thread
    found: Floats2  # the dot products of ROWS rows with TOGETHER tokens
    tokens: Floats2  # what `quantize` makes of all tokens


def _tasks(kind: int) -> Code:
    """The task for rows of one type, a constant when it is compiled."""

    def task_of_several(f, task, thread):
        first, depth, n = task * ROWS, f.k, f.k // GROUP
        n_rows, step = min(ROWS, f.n - first), 4 * _TOKEN_SLOTS * n
        bytes_, found = f.tokens[thread].ctypes.data, f.found[thread]
        starts, scales = bytes_ + 4 * BLOCK_SLOTS * n, bytes_ + 8 * BLOCK_SLOTS * n
        totals = scales + 4 * n
        for t in range(f.m):
            x, at = f.a[t * f.lda :].ctypes.data, t * step
            quantize(bytes_ + at, starts + at, scales + at, totals + at, x, n)
        for wanted in range(0, f.m, TOGETHER):
            t = min(wanted, f.m - TOGETHER)  # the last ones may have been multiplied before
            at = t * step
            for i in range(n_rows):
                row = f.w.address + (first + i) * f.w.row_bytes
                to = found[i * TOGETHER :].ctypes.data
                row_dots_ints(
                    kind, row, bytes_ + at, starts + at, scales + at, totals + at, depth, step, to
                )
            for j in range(wanted - t, TOGETHER):
                mine = f.c[(t + j) * f.n + first :][:n_rows]
                for i in range(n_rows):
                    mine[i] = found[i * TOGETHER + j] + (mine[i] if f.accumulate else np.float32(0))

    return task_code(SeveralProduct)(task_of_several)


_TASKS = {kind: _tasks(kind) for kind, name in enumerate(LAYOUTS) if name in INTEGER_TYPES}

# -- the path -------------------------------------------------------------------------------------


def _takes(p: Problem) -> bool:
    return p.form == "mul_mat" and int8.takes(p) and kind_of_rows(p.weight_type, p.k) >= 0


def _layout(p: Problem) -> Layout:
    tokens = p.m * (p.k // GROUP) * _TOKEN_SLOTS
    return Layout(found=per_thread(ROWS * TOGETHER), tokens=per_thread(tokens))


def _bind(p: Problem, o: Operands, **scratch: np.ndarray) -> Call:
    f = SeveralProduct(
        c=o.c.reshape(-1), a=flat(o.a), lda=o.lda, w=block_matrix(o.b, p.weight_type, 0), m=p.m,
        n=p.n, k=p.k, accumulate=o.accumulate, **scratch,
    )  # fmt: skip
    return Call(launch, stage(_TASKS[kind_of_rows(p.weight_type, p.k)], f, -(-p.n // ROWS)))


INT8 = Path(
    name="several int8", takes=_takes, layout=_layout, bind=_bind, fewest=TOGETHER, most=MOST
)
