"""y[T, N] (+)= x[T, K] · W[N, K]ᵀ for tokens too few to fill a tile: a weight row is a dot product.

Rows of types that pyggml.gemm.dots knows are multiplied as they lie, with x in float32 or, with
`ints`, rounded to bytes; others are unpacked piece by piece.
"""

from __future__ import annotations

import numpy as np

from pyggml._jit import Code, kernel
from pyggml._simd import dot
from pyggml._tasks import launch, stage, task_code
from pyggml.call import Call
from pyggml.gemm import int8
from pyggml.gemm.activations import QUADS, quantize
from pyggml.gemm.dots import group_sums, kind_of_rows, row_dot, row_dot_ints
from pyggml.gemm.frames import Product, block_matrix
from pyggml.gemm.microkernel import call_block
from pyggml.gemm.panels import DEPTH
from pyggml.gemm.path import Operands, Path, Problem, flat
from pyggml.quants.layout import GROUP
from pyggml.quants.unpack import INTEGER_TYPES, LAYOUTS, UNPACK
from pyggml.scratch import Layout, per_thread

FEW = 3  # so few tokens would leave the tiles empty
FEW_ROWS = 64  # weight rows of one task
_PER_BLOCK = 2 * QUADS + 2  # slots that `quantize` fills for GROUP numbers


def _few_tasks(kind: int, ints: bool) -> Code:
    """FEW_ROWS weight rows, multiplied with one token after the other.

    Compiled for one kind of rows at a time (see pyggml.gemm.dots); -1 for those to be unpacked.
    """

    def task_of_few(f, task, thread):
        x, depth = f.a, f.k
        first, last = task * FEW_ROWS, min((task + 1) * FEW_ROWS, f.n)
        mine = f.scratch[thread]
        found, row = mine[: last - first], mine[FEW_ROWS : FEW_ROWS + DEPTH]
        spare = mine[FEW_ROWS + DEPTH :]
        n = depth // GROUP
        data = spare.ctypes.data
        quads, scales = data + 4 * QUADS * n, data + 8 * QUADS * n
        for t in range(f.m):
            token = x[t * f.lda : t * f.lda + depth]
            if ints:
                quantize(data, quads, scales, scales + 4 * n, token.ctypes.data, n)
            elif kind >= 0:
                group_sums(spare, token)
            for i in range(last - first):
                here = f.w.address + (first + i) * f.w.row_bytes
                if ints:
                    found[i] = row_dot_ints(kind, here, data, quads, scales, scales + 4 * n, depth)
                elif kind >= 0:
                    found[i] = row_dot(kind, here, token.ctypes.data, data, depth)
                else:
                    found[i] = _unpacked_dot(f.w, here, token, row)
            _put_few(f, t, first, found)

    return task_code(Product)(task_of_few)


@kernel
def _put_few(f, t, first, found):
    """Numbers first … of token t's result, or what is added to them."""
    start = t * f.n + first
    mine = f.c[start : start + found.size]
    for i in range(found.size):
        mine[i] = found[i] + (mine[i] if f.accumulate else np.float32(0))


@kernel
def _unpacked_dot(w, address, x, row):
    """Σ w x of the row of W at this address, which goes through `row`, DEPTH weights at a time."""
    found = np.float32(0)
    for k0 in range(0, x.size, DEPTH):
        k = min(DEPTH, x.size - k0)
        here = address + k0 // w.block * w.block_bytes
        call_block(w.unpack, row.ctypes.data, here, k // w.block)
        found += dot(row[:k], x[k0 : k0 + k])
    return found


_FLOATS = {kind: _few_tasks(kind, False) for kind in range(-1, len(LAYOUTS))}
_INTS = {kind: _few_tasks(kind, True) for kind, name in enumerate(LAYOUTS) if name in INTEGER_TYPES}

# -- the paths ------------------------------------------------------------------------------------


def _layout(p: Problem) -> Layout:
    spare = -(-p.k // GROUP) * _PER_BLOCK
    return Layout(scratch=per_thread(FEW_ROWS + DEPTH + spare))


def _call(p: Problem, o: Operands, scratch: np.ndarray, code: Code, unpack: int) -> Call:
    f = Product(
        c=o.c.reshape(-1), a=flat(o.a), lda=o.lda, w=block_matrix(o.b, p.weight, unpack), m=p.m,
        n=p.n, k=p.k, accumulate=o.accumulate, scratch=scratch,
    )  # fmt: skip
    return Call(launch, stage(code, f, -(-p.n // FEW_ROWS)))


def _bind(p: Problem, o: Operands, scratch: np.ndarray) -> Call:
    kind = kind_of_rows(p.weight, p.k)
    unpack = UNPACK[p.weight.name].address if kind < 0 else 0  # else none is to be compiled
    return _call(p, o, scratch, _FLOATS[kind], unpack)


def _bind_int8(p: Problem, o: Operands, scratch: np.ndarray) -> Call:
    return _call(p, o, scratch, _INTS[kind_of_rows(p.weight, p.k)], 0)


def _takes_int8(p: Problem) -> bool:
    return p.form == "mul_mat" and int8.takes(p) and kind_of_rows(p.weight, p.k) >= 0


INT8 = Path(name="few int8", takes=_takes_int8, layout=_layout, bind=_bind_int8, most=FEW)
FLOATS = Path(name="few", takes=lambda p: p.form == "mul_mat", layout=_layout, bind=_bind, most=FEW)
