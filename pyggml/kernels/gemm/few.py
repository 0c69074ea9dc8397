"""y[T, N] (+)= x[T, K] · W[N, K]ᵀ for few tokens: each number is one dot product with a row of W.

Rows of the types in pyggml.kernels.gemm.dots are multiplied as they lie, with x in float32 or, with
`ints`, rounded to bytes. Rows of other types are unpacked piece by piece.
"""

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import Code, kernel
from pyggml.jit.frames import Floats2
from pyggml.jit.scratch import Layout, Scratch, per_thread
from pyggml.jit.simd import dot
from pyggml.jit.tasks import launch, stage, task_code
from pyggml.kernels.gemm import int8
from pyggml.kernels.gemm.activations import BLOCK_WORDS, quantize
from pyggml.kernels.gemm.dots import TOGETHER, group_sums, kind_of_rows, row_dots, row_dots_ints
from pyggml.kernels.gemm.frames import Product, block_matrix
from pyggml.kernels.gemm.microkernel import call_block, fetch
from pyggml.kernels.gemm.path import Operands, Path, Problem, flat
from pyggml.quants.layout import GROUP
from pyggml.quants.unpack import DIRECT_TYPES, INTEGER_TYPES, UNPACK
from pyggml.sizes import round_up

FEW = 3  # tokens at most: they would fill no tile
TASK_ROWS = 64  # weight rows of one task, a multiple of TOGETHER
AHEAD = 8192  # bytes ahead that are fetched: the CPU itself does not look beyond a page
PIECE = 256  # numbers of a weight row that are unpacked at a time; a multiple of every block
_TOKEN_WORDS = 2 * BLOCK_WORDS + 2  # that `quantize` writes for each block of a token


class FewProduct(Product):
    """A product of few tokens. A task takes TASK_ROWS rows of W."""

    # of each thread
    found: Floats2  # one token's dot products
    piece: Floats2
    token: Floats2  # what `quantize` or `group_sums` make of a token


def _few_tasks(kind: int, ints: bool) -> Code:
    """The task that multiplies TASK_ROWS weight rows with one token after the other.

    `kind`, a constant when it is compiled, is the rows' type (pyggml.kernels.gemm.dots); −1: unpack
    them.
    """

    def task_of_few(f, task, thread):
        x, depth, stride = f.a, f.k, f.w.row_bytes
        first, last = task * TASK_ROWS, min((task + 1) * TASK_ROWS, f.n)
        found, n = f.found[thread, : last - first], depth // GROUP
        at = f.token[thread].ctypes.data
        starts, scales = at + 4 * BLOCK_WORDS * n, at + 8 * BLOCK_WORDS * n
        for t in range(f.m):
            token = x[t * f.lda : t * f.lda + depth]
            if ints:
                quantize(at, starts, scales, scales + 4 * n, token.ctypes.data, n)
            elif kind >= 0:
                group_sums(f.token[thread], token)
            for i in range(0, last - first, TOGETHER):
                here, n_rows = f.w.address + (first + i) * stride, min(TOGETHER, last - first - i)
                to = f.found[thread, i:].ctypes.data
                if kind < 0 or TOGETHER == 1:
                    fetch(here + AHEAD, n_rows * stride)
                if ints:
                    row_dots_ints(
                        kind, to, here, stride, n_rows, at, starts, scales, scales + 4 * n, depth
                    )
                elif kind >= 0:
                    row_dots(kind, to, here, stride, n_rows, token.ctypes.data, at, depth)
                else:
                    for j in range(n_rows):
                        row = here + j * stride
                        found[i + j] = _unpacked_dot(f.w, row, token, f.piece[thread])
            _put_few(f, t, first, found)

    return task_code(FewProduct)(task_of_few)


@kernel
def _put_few(f, t, first, found):
    """Write `found` to token t's result from number `first` on, or add it."""
    start = t * f.n + first
    mine = f.c[start : start + found.size]
    for i in range(found.size):
        mine[i] = found[i] + (mine[i] if f.accumulate else np.float32(0))


@kernel
def _unpacked_dot(w, address, x, piece):
    """Σ w x of the row of W at this address; PIECE numbers at a time are unpacked to `piece`."""
    found = np.float32(0)
    for k0 in range(0, x.size, PIECE):
        k = min(PIECE, x.size - k0)
        here = address + k0 // w.block * w.block_bytes
        call_block(w.unpack, piece.ctypes.data, here, k // w.block)
        found += dot(piece[:k], x[k0 : k0 + k])
    return found


_FLOATS = {kind: _few_tasks(kind, False) for kind in range(-1, len(DIRECT_TYPES))}
_INTS = {
    kind: _few_tasks(kind, True) for kind, name in enumerate(DIRECT_TYPES) if name in INTEGER_TYPES
}

# -- the paths ------------------------------------------------------------------------------------


def _layout(p: Problem) -> Layout:
    token = round_up(p.k, GROUP) // GROUP * _TOKEN_WORDS
    return Layout(found=per_thread(TASK_ROWS), piece=per_thread(PIECE), token=per_thread(token))


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


def _bind_int8(p: Problem, o: Operands, **scratch: np.ndarray) -> Call:
    return _call(p, o, scratch, _INTS[kind_of_rows(p.weight_type, p.k)], 0)


def _takes_int8(p: Problem) -> bool:
    return p.form == "mul_mat" and int8.takes(p) and kind_of_rows(p.weight_type, p.k) >= 0


INT8 = Path(name="few int8", takes=_takes_int8, layout=_layout, bind=_bind_int8, most=FEW)
FLOATS = Path(name="few", takes=lambda p: p.form == "mul_mat", layout=_layout, bind=_bind, most=FEW)
