"""Cross entropy of rows of logits: the rows' losses, and their gradients.

A block of threads takes a row: the greatest logit and the sum of exponentials first, then what is
made of them. Sums over rows are in float64, by one block, so that they do not depend on the grid.
"""

import math
from math import prod
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.blocks import block_max, block_sum
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import Compute, CudaKernel, CudaSite
from pyggml.backends.cuda.runtime.launches import THREADS, in_turn, per_row
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import Tensor

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)


@device
def top_and_sum(x, start, n, parts):
    """(max x, Σ e^(x − max)) of n numbers from `start` on."""
    top = np.float32(-np.inf)
    for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
        top = max(top, x[start + j])
    top = block_max(top, parts)
    total = _ZERO
    for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
        total += math.exp(x[start + j] - top)
    return top, block_sum(total, parts)


@kernel
def _total(out, terms, mask, divisor):
    """out = Σ terms / divisor; for a divisor of 0, the number of rows whose mask is above ½."""
    parts = cuda.shared.array(THREADS, np.float64)
    total = np.float64(0)
    for i in range(cuda.threadIdx.x, terms.size, cuda.blockDim.x):
        total += terms[i]
    total, n = block_sum(total, parts), np.float64(divisor)
    if divisor == 0:
        for i in range(cuda.threadIdx.x, terms.size, cuda.blockDim.x):
            n += np.float64(1) if mask[i] > _HALF else np.float64(0)
        n = block_sum(n, parts)
    if cuda.threadIdx.x == 0:
        out[0] = total / max(n, np.float64(1))


def sum_of(out: Any, terms: Any, stream: Any) -> Call:
    """A call for out = Σ terms, float32."""
    return per_row(_total, 1, terms.size, stream, out, terms, terms, 1)


# -- one target for each row ---------------------------------------------------------------------


@kernel
def _rows_forward(losses, right, x, targets, weights, n, fault, number):
    """losses = w·(ln Σ e^x − x[target]); right: whether the target of a counting row is on top."""
    parts = cuda.shared.array(THREADS, np.float32)
    for i in range(cuda.blockIdx.x, losses.size, cuda.gridDim.x):
        top, total = top_and_sum(x, i * n, n, parts)
        target = targets[i]
        if cuda.threadIdx.x == 0:
            if 0 <= target < n:
                logit = x[i * n + target]
                losses[i] = weights[i] * (math.log(total) - (logit - top))
                right[i] = _ONE if logit == top and weights[i] != _ZERO else _ZERO
            else:
                losses[i] = right[i] = _ZERO
                cuda.atomic.max(fault, 0, number)


@kernel
def _rows_back(dx, d, x, targets, weights, n, fault, number):
    """dx = d·w·(softmax(x) − onehot)."""
    parts = cuda.shared.array(THREADS, np.float32)
    for i in range(cuda.blockIdx.x, weights.size, cuda.gridDim.x):
        top, total = top_and_sum(x, i * n, n, parts)
        target, share = targets[i], weights[i] * d[0]
        if not 0 <= target < n:
            cuda.atomic.max(fault, 0, number)
        for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
            p = math.exp(x[i * n + j] - top) / total
            dx[i * n + j] = share * (p - _ONE if j == target else p)


def target_fault(site: CudaSite, n_vocab: int) -> tuple[Any, Any]:
    """The cell and the number of the fault that a target is no token."""
    assert site.node.op is not None
    sentence = f"{site.node.op.name}: a target is outside the vocabulary of {n_vocab} tokens"
    return site.faults.cell, np.int32(site.faults.number(sentence))


def _forward(site: CudaSite, losses: Any, right: Any) -> Call:
    x, targets, weights = site.src
    n = site.node.src[0].shape[1]
    arguments = (losses, right, x, targets, weights, n, *target_fault(site, n))
    return per_row(_rows_forward, losses.size, n, site.stream, *arguments)


def _two_rows(node: Tensor, compute: Compute) -> int:
    return 2 * F32.block_bytes * node.src[0].shape[0]


def _bind_rows(site: CudaSite) -> Call:
    losses, right = _losses_and_right(site.scratch)
    sums = sum_of(site.out, losses, site.stream), sum_of(site.saved[0], right, site.stream)
    return in_turn(_forward(site, losses, right), *sums)


def _bind_by_row(site: CudaSite) -> Call:
    return _forward(site, site.out, _losses_and_right(site.scratch)[1])


def _losses_and_right(scratch: Any) -> tuple[Any, Any]:
    numbers = scratch.view(np.float32)
    half = numbers.size // 2
    return numbers[:half], numbers[half:]


def _bind_rows_back(site: CudaSite) -> Call:
    n_rows, n = site.node.shape
    arguments = (site.out, *site.src, n, *target_fault(site, n))
    return per_row(_rows_back, n_rows, n, site.stream, *arguments)


declare("cross_entropy_rows", CudaKernel(_bind_rows, scratch=_two_rows))
declare("cross_entropy_by_row", CudaKernel(_bind_by_row, scratch=_two_rows))
declare("cross_entropy_rows_back", CudaKernel(_bind_rows_back))

# -- labels for all numbers of a row -------------------------------------------------------------


@kernel
def _labels_forward(losses, x, labels, mask, has_mask, n):
    parts = cuda.shared.array(THREADS, np.float32)
    for i in range(cuda.blockIdx.x, losses.size, cuda.gridDim.x):
        top, total = top_and_sum(x, i * n, n, parts)
        mass = along = _ZERO
        for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
            mass += labels[i * n + j]
            along += labels[i * n + j] * (x[i * n + j] - top)
        mass, along = block_sum(mass, parts), block_sum(along, parts)
        if cuda.threadIdx.x == 0:
            counts = not has_mask or mask[i] > _HALF
            losses[i] = mass * math.log(total) - along if counts else _ZERO


@kernel
def _labels_back(dx, d, x, labels, mask, has_mask, n, n_rows):
    parts = cuda.shared.array(THREADS, np.float32)
    counting = np.float32(n_rows)
    if has_mask:
        some = _ZERO
        for i in range(cuda.threadIdx.x, n_rows, cuda.blockDim.x):
            some += _ONE if mask[i] > _HALF else _ZERO
        counting = max(block_sum(some, parts), _ONE)
    for i in range(cuda.blockIdx.x, n_rows, cuda.gridDim.x):
        share = d[0] / counting if not has_mask or mask[i] > _HALF else _ZERO
        top, total = top_and_sum(x, i * n, n, parts)
        mass = _ZERO
        for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
            mass += labels[i * n + j]
        mass = block_sum(mass, parts)
        for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
            p = math.exp(x[i * n + j] - top) / total
            dx[i * n + j] = share * (mass * p - labels[i * n + j])


def _rows_of(t: Tensor) -> int:
    return prod(t.shape[:-1])


def _bind_labels(site: CudaSite) -> Call:
    x, labels, *mask = site.src
    logits = site.node.src[0]
    losses = site.scratch.view(np.float32)
    n = logits.shape[-1]
    some = mask[0] if mask else x
    arguments = (losses, x, labels, some, bool(mask), n)
    rows = per_row(_labels_forward, losses.size, n, site.stream, *arguments)
    divisor = 0 if mask else losses.size
    mean = per_row(_total, 1, losses.size, site.stream, site.out, losses, some, divisor)
    return in_turn(rows, mean)


def _bind_labels_back(site: CudaSite) -> Call:
    d, x, labels, *mask = site.src
    n_rows, n = _rows_of(site.node), site.node.shape[-1]
    of_mask = (mask[0], True) if mask else (x, False)
    arguments = (site.out, d, x, labels, *of_mask, n, n_rows)
    return per_row(_labels_back, n_rows, n, site.stream, *arguments)


def _one_row(node: Tensor, compute: Compute) -> int:
    return F32.block_bytes * _rows_of(node.src[0])


declare("cross_entropy_loss", CudaKernel(_bind_labels, scratch=_one_row))
declare("cross_entropy_loss_back", CudaKernel(_bind_labels_back))
