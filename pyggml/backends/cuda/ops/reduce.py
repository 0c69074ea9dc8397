"""Sums of everything, running sums, counts: see pyggml/ops/arithmetic. Sums are in float64."""

from functools import partial
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.blocks import block_sum, first_row, rows_apart
from pyggml.backends.cuda.code.formulas import HALF, ZERO
from pyggml.backends.cuda.code.jit import kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaSite
from pyggml.backends.cuda.runtime.launches import THREADS, in_turn, per_element, per_row, per_rows
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call
from pyggml.graph.tensor import Tensor

_PIECE = 1 << 14  # elements that one block adds up


@kernel
def _row_sums(out, x, n):
    """out_r = Σ of row r; the last row may be shorter than n."""
    parts = cuda.shared.array(THREADS, np.float64)
    for row in range(first_row(), out.size, rows_apart()):
        last, total = min((row + 1) * n, x.size), np.float64(0)
        for i in range(row * n + cuda.threadIdx.x, last, cuda.blockDim.x):
            total += x[i]
        total = block_sum(total, parts)
        if cuda.threadIdx.x == 0:
            out[row] = total


def row_sums(out: Any, x: Any, n: int, stream: Any) -> Call:
    """A call for out_r = Σ of row r of n numbers; the last row may be shorter."""
    return per_rows(_row_sums, out.size, n, stream, out, x, n)


def _n_pieces(x: Tensor) -> int:
    return max(1, -(-x.n_elements // _PIECE))


def _sum(site: CudaSite) -> Call:
    sums = site.scratch.view(np.float64)
    return in_turn(
        row_sums(sums, site.src[0], _PIECE, site.stream),
        row_sums(site.out, sums, sums.size, site.stream),
    )


@kernel
def _cumsum(out, x, n, backwards):
    """A thread has a row; out may be x."""
    for row in range(cuda.grid(1), out.size // n, cuda.gridsize(1)):
        total = ZERO
        for j in range(n):
            at = row * n + (n - 1 - j if backwards else j)
            total += x[at]
            out[at] = total


def _running(backwards: bool, site: CudaSite) -> Call:
    n = site.node.shape[-1]
    n_rows = site.out.size // n
    return per_element(_cumsum, n_rows, site.stream, site.out, *site.src, n, backwards)


@kernel
def _count_equal(out, a, b, mask):
    """One block; the mask may have one element."""
    parts = cuda.shared.array(THREADS, np.int64)
    total = 0
    for i in range(cuda.threadIdx.x, a.size, cuda.blockDim.x):
        if a[i] == b[i] and mask[i % mask.size] > HALF:
            total += 1
    total = block_sum(total, parts)
    if cuda.threadIdx.x == 0:
        out[0] = total


def _bind_count(site: CudaSite) -> Call:
    a, b, *mask = site.src
    weights: Any = mask[0] if mask else site.constant(np.ones(1, np.float32))
    return per_row(_count_equal, 1, a.size, site.stream, site.out, a, b, weights)


declare("sum", _sum, scratch=lambda node, compute: 8 * _n_pieces(node.src[0]))
declare("cumsum", partial(_running, False))
declare("cumsum_back", partial(_running, True))
declare("count_equal", _bind_count)
