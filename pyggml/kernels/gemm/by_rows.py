"""y[T, N] (+)= x[T, K] · W[N, K]ᵀ in integers, row by row of W as it lies, any quantised type.

x is rounded to bytes (pyggml.kernels.gemm.int_pack), once for all products with weights of a type
that read it; then a task takes some rows, each of which meets some tokens at once
(pyggml.kernels.gemm.int_dots). A token has the same products beside any others.

Tiles are faster for more than a few tokens. Without VNNI this makes as many operations a second as
tiles of float32 make of 64 tokens and more, twice as many as they do of one to eight, and up to 24
tokens as many as tiles of bytes of weights that these round anew (pyggml.kernels.gemm.paths).
"""

from functools import cache

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import Code, kernel
from pyggml.jit.frames import Floats1, Floats2, Int
from pyggml.jit.isa import CHOSEN
from pyggml.jit.scratch import Array, Layout, per_thread
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
TASK_ROWS = 256  # at most, of one task
CLOSE_ROWS = 32  # that all tokens meet before the next: they stay in the second cache
_TASKS = 4  # of a thread, where rows are few


class RowProduct(Product):
    """A product row by row. A task takes `rows` rows of W."""

    rows: Int
    n_threads: Int
    group_bytes: Int  # packed tokens that are multiplied at once
    packed_a: Floats1
    dots: Floats2  # of each thread: each token's dot products, TASK_ROWS apart


@kernel
def _ahead(f, task, row, last):
    """How far ahead is fetched at a row. Past the last row of a task, where rows may be another
    thread's, it is the thread's next task; if it has none, what it has read."""
    if (last - row) * f.w.row_bytes > AHEAD:
        return AHEAD
    after = (task + f.n_threads) * f.rows
    return AHEAD + (after - last) * f.w.row_bytes if after < f.n else 0


@cache
def _pack_code(kind: int, n_tokens: int) -> Code:
    """The task that packs a token for rows of type WHOLE_TYPES[kind], n_tokens at once; the last
    one is taken again where there are fewer."""

    def pack_task(f, task, thread):
        x = f.a[min(task, f.m - 1) * f.lda :].ctypes.data
        to = f.packed_a.ctypes.data + task // n_tokens * f.group_bytes
        pack_token(kind, n_tokens, to, task % n_tokens, x, f.k)

    return task_code(RowProduct, exact=True)(pack_task)


@cache
def _task(kind: int, n_tokens: int) -> Code:
    """The task that multiplies some rows of this type with all tokens."""

    def task_of_rows(f, task, thread):
        first, last = task * f.rows, min((task + 1) * f.rows, f.n)
        for start in range(first, last, CLOSE_ROWS):
            for group in range((f.m + n_tokens - 1) // n_tokens):
                to = f.dots[thread, group * n_tokens * TASK_ROWS + start - first :].ctypes.data
                x = f.packed_a.ctypes.data + group * f.group_bytes
                for i in range(min(CLOSE_ROWS, last - start)):
                    row = f.w.address + (start + i) * f.w.row_bytes
                    ahead = _ahead(f, task, start + i, last)
                    int_dots(kind, n_tokens, to + 4 * i, 4 * TASK_ROWS, row, x, ahead, f.k)
        for t in range(f.m):
            put_products(f, t, first, f.dots[thread, t * TASK_ROWS : t * TASK_ROWS + last - first])

    # Exact: else the order of a token's sums might depend on n_tokens.
    return task_code(RowProduct, exact=True)(task_of_rows)


# -- the path -------------------------------------------------------------------------------------


def _takes(p: Problem) -> bool:
    return p.form == "mul_mat" and p.compute == "int8" and p.weight_type.name in WHOLE_TYPES


def _layout(p: Problem) -> Layout:
    tokens = round_up(p.m, min(p.m, TOGETHER))
    n = tokens * packed_bytes(p.weight_type.name, p.k) // 4
    return Layout(dots=per_thread(tokens * TASK_ROWS), packed_a=Array((n,)))


def _bind(p: Problem, o: Operands, **scratch: np.ndarray) -> Call:
    w, name, n_tokens = block_matrix(o.b, p.weight_type, 0), p.weight_type.name, min(p.m, TOGETHER)
    dots, packed_a = scratch["dots"], scratch["packed_a"]
    rows = max(1, min(TASK_ROWS, p.n // (_TASKS * len(dots))))
    f = RowProduct(
        c=o.c.reshape(-1), a=flat(o.a), lda=o.lda, w=w, m=p.m, n=p.n, k=p.k,
        accumulate=o.accumulate, rows=rows, n_threads=len(dots),
        group_bytes=n_tokens * packed_bytes(name, p.k), **scratch,
    )  # fmt: skip
    kind, c, a = WHOLE_TYPES.index(name), whole(f.values["c"], False), whole(f.values["a"])
    n_packs, own = round_up(p.m, n_tokens), of_threads({"dots": dots})
    pack = stage(_pack_code(kind, n_tokens), f, n_packs, a, whole(packed_a, False))
    multiply = stage(
        _task(kind, n_tokens), f, -(-p.n // rows), c, whole(packed_a), whole(o.b), *own
    )  # fmt: skip
    return Call(launch, multiply) if o.packing and o.packing.done else Call(launch, pack, multiply)


INT8 = ProductPath(
    name="int8 by rows", takes=_takes, layout=_layout, bind=_bind, most=MOST, shares=True,
    packs_by_type=True,
)  # fmt: skip
