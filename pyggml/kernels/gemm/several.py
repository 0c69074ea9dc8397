"""y[T, N] (+)= x[T, K] · W[N, K]ᵀ for several tokens, as when several texts are written at once.

As in pyggml.kernels.gemm.few, W's rows are multiplied as they lie, with x in bytes; as in a tile,
LANES of them at once. Nothing is unpacked to memory (pyggml.kernels.gemm.lane_dots). Tokens are
taken in groups: a token has the same products in any group, beside any others.
"""

from functools import cache

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import Code
from pyggml.jit.frames import Floats1, Floats2
from pyggml.jit.scratch import Array, Layout, per_thread
from pyggml.jit.simd import fill
from pyggml.jit.tasks import launch, stage, task_code
from pyggml.kernels.gemm import int8
from pyggml.kernels.gemm.activations import BLOCK_WORDS, quantize
from pyggml.kernels.gemm.frames import Product, block_matrix
from pyggml.kernels.gemm.lane_dots import (
    FIRST,
    KINDS,
    SCALE,
    SECOND,
    START,
    TOGETHER,
    TOKEN_WORDS,
    TOTAL,
    lane_dots,
)
from pyggml.kernels.gemm.path import Operands, Problem, ProductPath, flat
from pyggml.quants.layout import GROUP, SUBGROUP
from pyggml.quants.readers.lanes import LANES
from pyggml.sizes import round_up

FEWEST, MOST = 4, 16  # tokens, measured
TASK_ROWS = 64  # weight rows of one task, a multiple of LANES
_FEW = 4  # tokens of a group that has no more
_FLAT_WORDS = BLOCK_WORDS + 3  # that `quantize` writes for each block of a token


class SeveralProduct(Product):
    """A product of several tokens. A task takes TASK_ROWS rows of W."""

    packed_a: Floats1  # x in groups of tokens, as pyggml.kernels.gemm.lane_dots reads it
    # of each thread
    token: Floats2  # what `quantize` makes of a token
    products: Floats2  # the products of a group of tokens with LANES rows


def _together(n_tokens: int) -> int:
    """The tokens of a group; the last group is filled up with zeros."""
    return _FEW if n_tokens <= _FEW else TOGETHER


@cache
def _pack_code(n_together: int) -> Code:
    """The task that packs one token."""

    def pack_task(f, task, thread):
        n, mine = f.k // GROUP, f.token[thread]
        q, of_blocks = mine.view(np.int8), mine[BLOCK_WORDS * n :]
        if task < f.m:
            x = f.a[task * f.lda :].ctypes.data
            quantize(mine.ctypes.data, of_blocks.ctypes.data, 1, x, n, x)
        else:
            fill(mine, np.float32(0))
        size, t = n_together * TOKEN_WORDS, task % n_together
        group = f.packed_a[task // n_together * n * size :]
        for block in range(n):
            bytes_, terms = group[block * size :], group[block * size + n_together * BLOCK_WORDS :]
            for j in range(BLOCK_WORDS):
                bytes_[t * BLOCK_WORDS + j] = mine[block * BLOCK_WORDS + j]
            terms[SCALE * n_together + t] = of_blocks[3 * block]
            terms[START * n_together + t] = of_blocks[3 * block + 1]
            terms[TOTAL * n_together + t] = of_blocks[3 * block + 2]
            starts = terms.view(np.int32)
            for half, which in enumerate((FIRST, SECOND)):
                total, first = np.int32(0), block * GROUP + half * SUBGROUP
                for j in range(first, first + SUBGROUP):
                    total = np.int32(total + q[j])
                starts[which * n_together + t] = -128 * total

    return task_code(SeveralProduct)(pack_task)


@cache
def _code(kind: int, n_together: int) -> Code:
    """The task that multiplies TASK_ROWS rows of type KINDS[kind] with all tokens."""

    def task_of_several(f, task, thread):
        first, products = task * TASK_ROWS, f.products[thread]
        size = f.k // GROUP * n_together * TOKEN_WORDS
        for unclipped in range(first, min(first + TASK_ROWS, f.n), LANES):
            row = min(unclipped, f.n - LANES)  # the last ones may have been multiplied before
            here, to = f.w.address + row * f.w.row_bytes, products.ctypes.data
            for t0 in range(0, f.m, n_together):
                x = f.packed_a[t0 // n_together * size :].ctypes.data
                lane_dots(kind, n_together, here, f.w.row_bytes, x, f.k, to)
                for t in range(t0, min(t0 + n_together, f.m)):
                    mine = f.c[t * f.n + unclipped : t * f.n + row + LANES]
                    of, adds = products[(t - t0) * LANES + unclipped - row :], f.accumulate
                    for i in range(mine.size):
                        mine[i] = of[i] + (mine[i] if adds else np.float32(0))

    return task_code(SeveralProduct)(task_of_several)


# -- the path -------------------------------------------------------------------------------------


def _takes(p: Problem) -> bool:
    if p.form != "mul_mat" or p.n < LANES or not int8.takes(p):
        return False
    return p.weight_type.name in KINDS


def _layout(p: Problem) -> Layout:
    n = p.k // GROUP
    return Layout(
        packed_a=Array((round_up(p.m, _together(p.m)) * n * TOKEN_WORDS,)),
        token=per_thread(n * _FLAT_WORDS),
        products=per_thread(TOGETHER * LANES),
    )


def _bind(p: Problem, o: Operands, **scratch: np.ndarray) -> Call:
    n = _together(p.m)
    f = SeveralProduct(
        c=o.c.reshape(-1), a=flat(o.a), lda=o.lda, w=block_matrix(o.b, p.weight_type, 0), m=p.m,
        n=p.n, k=p.k, accumulate=o.accumulate, **scratch,
    )  # fmt: skip
    multiply = stage(_code(KINDS.index(p.weight_type.name), n), f, -(-p.n // TASK_ROWS))
    if o.packing is not None and o.packing.done:
        return Call(launch, multiply)
    return Call(launch, stage(_pack_code(n), f, round_up(p.m, n)), multiply)


INT8 = ProductPath(
    name="several int8", takes=_takes, layout=_layout, bind=_bind, fewest=FEWEST, most=MOST,
    shares=True,
)  # fmt: skip
