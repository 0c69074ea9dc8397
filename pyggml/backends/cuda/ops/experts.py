"""Products with one weight per expert: row (t, u) with expert ids[t, u]; see ops/experts.

Each warp or thread finds its row's expert by itself, so that the ids never leave the card. A row of
an id that is no expert is left 0, and the fault is noted.
"""

from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.jit import kernel
from pyggml.backends.cuda.code.warp import LANES, warp_sum
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import Kernel, Site
from pyggml.backends.cuda.runtime.launches import launch, per_element
from pyggml.backends.cuda.runtime.simulator import small
from pyggml.backends.cuda.runtime.table import declare
from pyggml.backends.cuda.weights.readers import weight_of
from pyggml.graph.call import Call
from pyggml.graph.dtypes import DTYPES
from pyggml.graph.tensor import Tensor

_WARPS = small(8)  # of a block
_ZERO = np.float32(0)


@cache
def _forward(name: str) -> Any:
    weight = weight_of(name)
    block, block_bytes = DTYPES[name].block, DTYPES[name].block_bytes

    @kernel
    def multiply(y, w, x, ids, sizes, rows_of_x, fault, number):
        """y[r, n] = x[r] · w[ids[r], n]: a warp for each number."""
        n_experts, n, k = sizes
        lane, warp = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        row_bytes = k // block * block_bytes
        for i in range(cuda.blockIdx.x * _WARPS + warp, y.size, cuda.gridDim.x * _WARPS):
            row, column = i // n, i % n
            expert, total = ids[row], _ZERO
            if 0 <= expert < n_experts:
                start = (np.int64(expert) * n + column) * row_bytes
                of_x = row // rows_of_x * k
                for j in range(lane, k, LANES):
                    w_j = weight(w, start + j // block * block_bytes, j % block)
                    total += w_j * x[of_x + j]
            elif lane == 0:
                cuda.atomic.max(fault, 0, number)
            total = warp_sum(total)
            if lane == 0:
                y[i] = total

    return multiply


@cache
def _backward(name: str) -> Any:
    weight = weight_of(name)
    block, block_bytes = DTYPES[name].block, DTYPES[name].block_bytes

    @kernel
    def multiply(dx, w, dy, ids, sizes, fault, number):
        """dx[r, k] = Σ_n dy[r, n] · w[ids[r], n, k]: a thread for each number."""
        n_experts, n, k = sizes
        row_bytes = k // block * block_bytes
        for i in range(cuda.grid(1), dx.size, cuda.gridsize(1)):
            row, column = i // k, i % k
            expert, total = ids[row], _ZERO
            if 0 <= expert < n_experts:
                start = np.int64(expert) * n * row_bytes + column // block * block_bytes
                for j in range(n):
                    total += dy[row * n + j] * weight(w, start + j * row_bytes, column % block)
            else:
                cuda.atomic.max(fault, 0, number)
            dx[i] = total

    return multiply


@kernel
def _sums(dw, x, dy, ids, n, k, rows_of_x, n_experts, fault, number):
    """dw[e, n, k] = Σ dy[r, n] · x[r, k] over the rows r of expert e: a thread for each number."""
    for i in range(cuda.grid(1), dw.size, cuda.gridsize(1)):
        expert, rest = i // (n * k), i % (n * k)
        row_of_w, column, total = rest // k, rest % k, _ZERO
        for row in range(ids.size):
            if ids[row] == expert:
                total += dy[row * n + row_of_w] * x[row // rows_of_x * k + column]
            elif not 0 <= ids[row] < n_experts:
                cuda.atomic.max(fault, 0, number)
        dw[i] = total


@kernel
def _add(y, x, b, ids, n, n_experts, fault, number):
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        expert = ids[i // n]
        if 0 <= expert < n_experts:
            y[i] = x[i] + b[expert * n + i % n]
        else:
            y[i] = _ZERO
            cuda.atomic.max(fault, 0, number)


def _fault(site: Site, n_experts: int) -> tuple[Any, Any]:
    assert site.node.op is not None
    sentence = f"{site.node.op.name}: an id is not one of {n_experts} experts"
    return site.faults.cell, np.int32(site.faults.number(sentence))


def _rows_of(x: Tensor, ids: Tensor) -> int:
    """How many rows of the result take one row of x."""
    return max(1, ids.n_elements // (x.shape[0] * x.shape[1]))


def _bind_forward(site: Site) -> Call:
    w, x, ids = site.node.src
    run, arrays = _forward(w.dtype.name), (site.out, site.src[0].view(np.uint8), *site.src[1:])
    grid = small(min(-(-site.node.n_elements // _WARPS), 1 << 20))
    rest = (w.shape, _rows_of(x, ids), *_fault(site, w.shape[0]))
    return launch(run, grid, _WARPS * LANES, site.stream, *arrays, *rest)


def _bind_backward(site: Site) -> Call:
    w = site.node.src[0]
    arrays = (site.out, site.src[0].view(np.uint8), *site.src[1:])
    rest = (w.shape, *_fault(site, w.shape[0]))
    return per_element(_backward(w.dtype.name), site.out.size, site.stream, *arrays, *rest)


def _bind_sums(site: Site) -> Call:
    x, _, ids = site.node.src
    n_experts, n, k = site.node.shape
    rest = (n, k, _rows_of(x, ids), n_experts, *_fault(site, n_experts))
    return per_element(_sums, site.out.size, site.stream, site.out, *site.src, *rest)


def _bind_add(site: Site) -> Call:
    n_experts, n = site.node.src[1].shape
    rest = (n, n_experts, *_fault(site, n_experts))
    return per_element(_add, site.out.size, site.stream, site.out, *site.src, *rest)


declare("mul_mat_id", Kernel(_bind_forward))
declare("mul_mat_id_back", Kernel(_bind_backward))
declare("out_prod_id", Kernel(_bind_sums))
declare("add_id", Kernel(_bind_add))
