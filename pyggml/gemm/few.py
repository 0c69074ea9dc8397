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
from pyggml.gemm.activations import QUADS, quantize
from pyggml.gemm.dots import group_sums, row_dot, row_dot_ints
from pyggml.gemm.frames import TILE_FLOATS, BlockMatrix, Product, scratch_of
from pyggml.gemm.microkernel import call_block
from pyggml.gemm.panels import DEPTH
from pyggml.quants.layout import GROUP
from pyggml.quants.unpack import INTEGER_TYPES, LAYOUTS

FEW = 3  # so few tokens would leave the tiles empty
FEW_ROWS = 64  # weight rows of one task
_PER_BLOCK = 2 * QUADS + 2  # slots that `quantize` fills for GROUP numbers
LONGEST_INTS = TILE_FLOATS // _PER_BLOCK * GROUP  # numbers of a row that a thread can keep as bytes


def _few_tasks(kind: int, ints: bool) -> Code:
    """FEW_ROWS weight rows, multiplied with one token after the other.

    Compiled for one kind of rows at a time (see pyggml.gemm.dots); -1 for those to be unpacked.
    """

    def task_of_few(f, task, thread):
        x, depth = f.a, f.k
        found, spare, _ = scratch_of(f, thread)
        first, last = task * FEW_ROWS, min((task + 1) * FEW_ROWS, f.n)
        found, row = found[: last - first], found[FEW_ROWS:]
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


def forward(
    y: np.ndarray, x: np.ndarray, x_step: int, w: BlockMatrix, kind: int,
    shape: tuple[int, int, int], accumulate: bool, ints: bool, scratch: np.ndarray,
) -> Call:  # fmt: skip
    """y (+)= x · Wᵀ; y and x flat, rows of x x_step floats apart; kind of dots.kind_of_rows."""
    m, n, k = shape
    f = Product(c=y, a=x, lda=x_step, w=w, m=m, n=n, k=k, accumulate=accumulate, scratch=scratch)
    return Call(launch, stage((_INTS if ints else _FLOATS)[kind], f, -(-n // FEW_ROWS)))
