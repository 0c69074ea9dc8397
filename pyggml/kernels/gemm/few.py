"""y[T, N] (+)= x[T, K] · W[N, K]ᵀ for few tokens: each number is one dot product with a row of W.

x is in float32. Rows of the types in pyggml.kernels.gemm.dots are multiplied as they lie; rows of
other types are unpacked piece by piece.
"""

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import Code, kernel
from pyggml.jit.frames import Floats2
from pyggml.jit.scratch import Layout, Scratch, per_thread
from pyggml.jit.simd import dot
from pyggml.jit.tasks import launch, stage, task_code
from pyggml.kernels.gemm.dots import TOGETHER, group_sums, kind_of_rows, row_dots
from pyggml.kernels.gemm.frames import Product, block_matrix
from pyggml.kernels.gemm.microkernel import call_block, fetch
from pyggml.kernels.gemm.path import Operands, Problem, ProductPath, flat
from pyggml.quants.layout import GROUP
from pyggml.quants.unpack import DIRECT_TYPES, UNPACK
from pyggml.sizes import round_up

FEW = 3  # tokens at most: they would fill no tile
TASK_ROWS = 64  # weight rows of one task, a multiple of TOGETHER
AHEAD = 8192  # bytes ahead that are fetched: the CPU itself does not look beyond a page
PIECE = 256  # numbers of a weight row that are unpacked at a time; a multiple of every block


class FewProduct(Product):
    """A product of few tokens. A task takes TASK_ROWS rows of W."""

    # of each thread
    dots: Floats2  # one token's dot products
    piece: Floats2
    token: Floats2  # the sums of a token's groups


def _few_tasks(kind: int) -> Code:
    """The task that multiplies TASK_ROWS weight rows with one token after the other.

    `kind`, a constant when it is compiled, is the rows' type (pyggml.kernels.gemm.dots); −1: unpack
    them.
    """

    def task_of_few(f, task, thread):
        x, depth, stride = f.a, f.k, f.w.row_bytes
        first, last = task * TASK_ROWS, min((task + 1) * TASK_ROWS, f.n)
        dots = f.dots[thread, : last - first]
        sums = f.token[thread]
        for t in range(f.m):
            token = x[t * f.lda : t * f.lda + depth]
            if kind >= 0:
                group_sums(sums, token)
            for i in range(0, last - first, TOGETHER):
                here, n_rows = f.w.address + (first + i) * stride, min(TOGETHER, last - first - i)
                to = f.dots[thread, i:].ctypes.data
                if kind < 0 or TOGETHER == 1:
                    fetch(here + AHEAD, n_rows * stride)
                if kind >= 0:
                    x_here, sums_here = token.ctypes.data, sums.ctypes.data
                    row_dots(kind, to, here, stride, n_rows, x_here, sums_here, depth)
                else:
                    for j in range(n_rows):
                        row = here + j * stride
                        dots[i + j] = _unpacked_dot(f.w, row, token, f.piece[thread])
            put_products(f, t, first, dots)

    return task_code(FewProduct)(task_of_few)


@kernel
def put_products(f, t, first, dots):
    """Write `dots` to token t's result from number `first` on, or add it."""
    start = t * f.n + first
    mine, adds = f.c[start : start + dots.size], f.accumulate
    for i in range(dots.size):
        mine[i] = dots[i] + (mine[i] if adds else np.float32(0))


@kernel
def _unpacked_dot(w, address, x, piece):
    """Σ w x of the row of W at this address; PIECE numbers at a time are unpacked to `piece`."""
    total = np.float32(0)
    for k0 in range(0, x.size, PIECE):
        k = min(PIECE, x.size - k0)
        here = address + k0 // w.block * w.block_bytes
        call_block(w.unpack, piece.ctypes.data, here, k // w.block)
        total += dot(piece[:k], x[k0 : k0 + k])
    return total


_FLOATS = {kind: _few_tasks(kind) for kind in range(-1, len(DIRECT_TYPES))}

# -- the path -------------------------------------------------------------------------------------


def _layout(p: Problem) -> Layout:
    sums = round_up(p.k, GROUP) // GROUP
    return Layout(dots=per_thread(TASK_ROWS), piece=per_thread(PIECE), token=per_thread(sums))


def _call(p: Problem, o: Operands, scratch: Scratch, code: Code, unpack: int) -> Call:
    w = block_matrix(o.b, p.weight_type, unpack)
    f = FewProduct(
        c=o.c.reshape(-1), a=flat(o.a), lda=o.lda, w=w, m=p.m, n=p.n, k=p.k,
        accumulate=o.accumulate, **scratch,
    )  # fmt: skip
    return Call(launch, stage(code, f, -(-p.n // TASK_ROWS)))


def _bind(p: Problem, o: Operands, **scratch: np.ndarray) -> Call:
    kind = kind_of_rows(p.weight_type, p.k)
    unpack = UNPACK[p.weight_type.name].address if kind < 0 else 0  # else none is to be compiled
    return _call(p, o, scratch, _FLOATS[kind], unpack)


FLOATS = ProductPath(
    name="few", takes=lambda p: p.form == "mul_mat", layout=_layout, bind=_bind, most=FEW
)
