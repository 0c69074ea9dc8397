"""y[T, N] (+)= x[T, K] · W[N, K]ᵀ in integers, row by row of W as it lies, any quantised type.

x is rounded to bytes (pyggml.kernels.gemm.int_pack), and some tokens at once meet a row
(pyggml.kernels.gemm.int_dots). A task takes some rows and some tokens, and rounds those itself: a
twentieth of its time, and no other task is waited for. A token has the same products beside any
others.

Tiles are faster for more than a few tokens. Without VNNI this makes as many operations a second as
tiles of float32 make of 64 tokens and more, twice as many as they do of one to eight, and up to 24
tokens as many as tiles of bytes of weights that these round anew (pyggml.kernels.gemm.paths).
"""

from functools import cache

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import Code, kernel
from pyggml.jit.frames import Floats2, Int
from pyggml.jit.isa import CHOSEN
from pyggml.jit.scratch import Layout, per_thread
from pyggml.jit.tasks import launch, of_threads, stage, task_code, whole
from pyggml.kernels.gemm.few import put_products
from pyggml.kernels.gemm.frames import Product, block_matrix
from pyggml.kernels.gemm.int_dots import AHEAD, int_dots
from pyggml.kernels.gemm.int_pack import pack_token, packed_bytes
from pyggml.kernels.gemm.path import Operands, Problem, ProductPath, flat
from pyggml.quants.unpack import WHOLE_TYPES
from pyggml.sizes import round_up

# Tokens at most, measured. Four and more are of paths that stand above, if those take the type.
MOST = 32 if CHOSEN.byte_pairs else 8
TOGETHER = 4  # tokens whose sums leave registers for a unit of a row
TASK_ROWS, TASK_TOKENS = 256, 64  # at most, of one task
CLOSE_ROWS = 32  # that all tokens of a task meet before the next: they stay in the second cache
_TASKS = 2  # of a thread, where rows are few


class RowProduct(Product):
    """A product row by row. A task takes `rows` rows of W, and one of n_shares shares of tokens."""

    rows: Int
    n_shares: Int
    n_threads: Int
    group_bytes: Int  # packed tokens that are multiplied at once
    # of each thread
    dots: Floats2  # each token's dot products, TASK_ROWS apart
    packed: Floats2  # the tokens of a task


@kernel
def _ahead(f, task, row, last):
    """How far ahead is fetched at a row. Past the last row of a task, where rows may be another
    thread's, it is the thread's next task; if it has none, what it has read."""
    if (last - row) * f.w.row_bytes > AHEAD:
        return AHEAD
    after = (task + f.n_threads) // f.n_shares * f.rows
    return AHEAD + (after - last) * f.w.row_bytes if after < f.n else 0


@cache
def _task(kind: int, n_tokens: int) -> Code:
    """The task for rows of type WHOLE_TYPES[kind], n_tokens at once; the last token is taken again
    where there are fewer."""

    def task_of_rows(f, task, thread):
        first, last = task // f.n_shares * f.rows, min((task // f.n_shares + 1) * f.rows, f.n)
        t0 = task % f.n_shares * TASK_TOKENS
        n = min(TASK_TOKENS, f.m - t0)
        n_groups = (n + n_tokens - 1) // n_tokens
        packed = f.packed[thread].ctypes.data
        for t in range(n_groups * n_tokens):
            x, to = f.a[(t0 + min(t, n - 1)) * f.lda :], packed + t // n_tokens * f.group_bytes
            pack_token(kind, n_tokens, to, t % n_tokens, x.ctypes.data, f.k)
        for start in range(first, last, CLOSE_ROWS):
            for group in range(n_groups):
                to = f.dots[thread, group * n_tokens * TASK_ROWS + start - first :].ctypes.data
                x = packed + group * f.group_bytes
                for i in range(min(CLOSE_ROWS, last - start)):
                    row = f.w.address + (start + i) * f.w.row_bytes
                    ahead = _ahead(f, task, start + i, last)
                    int_dots(kind, n_tokens, to + 4 * i, 4 * TASK_ROWS, row, x, ahead, f.k)
        for t in range(n):
            dots = f.dots[thread, t * TASK_ROWS : t * TASK_ROWS + last - first]
            put_products(f, t0 + t, first, dots)

    # Exact: else the order of a token's sums might depend on n_tokens.
    return task_code(RowProduct, exact=True)(task_of_rows)


# -- the path -------------------------------------------------------------------------------------


def _takes(p: Problem) -> bool:
    return p.form == "mul_mat" and p.compute == "int8" and p.weight_type.name in WHOLE_TYPES


def _layout(p: Problem) -> Layout:
    tokens = round_up(min(p.m, TASK_TOKENS), min(p.m, TOGETHER))
    n = tokens * packed_bytes(p.weight_type.name, p.k) // 4
    return Layout(dots=per_thread(tokens * TASK_ROWS), packed=per_thread(n))


def _bind(p: Problem, o: Operands, **scratch: np.ndarray) -> Call:
    w, name = block_matrix(o.b, p.weight_type, 0), p.weight_type.name
    n_shares, n_tokens = -(-p.m // TASK_TOKENS), min(p.m, TOGETHER)
    balanced = p.n * n_shares // (_TASKS * len(scratch["packed"]))
    rows = max(1, min(TASK_ROWS, balanced))
    f = RowProduct(
        c=o.c.reshape(-1), a=flat(o.a), lda=o.lda, w=w, m=p.m, n=p.n, k=p.k,
        accumulate=o.accumulate, rows=rows, n_shares=n_shares, n_threads=len(scratch["packed"]),
        group_bytes=n_tokens * packed_bytes(name, p.k), **scratch,
    )  # fmt: skip
    code = _task(WHOLE_TYPES.index(name), n_tokens)
    c, a = whole(f.values["c"], False), whole(f.values["a"])
    n_tasks = -(-p.n // rows) * n_shares
    return Call(launch, stage(code, f, n_tasks, c, a, whole(o.b), *of_threads(scratch)))


INT8 = ProductPath(name="int8 by rows", takes=_takes, layout=_layout, bind=_bind, most=MOST)
