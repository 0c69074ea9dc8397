"""The output layer and the loss in one: the logits of some rows at a time, and their gradient.

The (rows × vocabulary) matrix never exists as a whole. Rows of weight 0 have gradients of 0; they
cost as much as others here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pyggml.backends.cuda.blocks import block_max, block_sum
from pyggml.backends.cuda.driver import cuda, device, kernel
from pyggml.backends.cuda.gemm import Factor, Operands, Problem, path_of
from pyggml.backends.cuda.kernel import Compute, Kernel, Site
from pyggml.backends.cuda.launch import THREADS, in_turn, per_row
from pyggml.backends.cuda.losses import summed, target_fault
from pyggml.backends.cuda.table import declare
from pyggml.call import Call
from pyggml.dtypes import F32
from pyggml.sizes import round_up
from pyggml.tensors import Tensor

LOGITS_BYTES = 640 << 20  # of all logits that exist at once: 1024 rows of 150,000 tokens
_LINE = 64
_ZERO, _ONE = np.float32(0), np.float32(1)


@device
def _capped(z, cap):
    return cap * math.tanh(z / cap) if cap > _ZERO else z


@kernel
def _softmax_rows(z, losses, right, targets, weights, n, cap, gradient, fault, number):
    """The losses of rows of logits, and whether the target of a counting row is on top.

    With `gradient`, z becomes weight · (softmax z − onehot) · slope, the cap's slope or 1.
    """
    parts = cuda.shared.array(THREADS, np.float32)
    for i in range(cuda.blockIdx.x, losses.size, cuda.gridDim.x):
        start, target, weight = np.int64(i) * n, targets[i], weights[i]
        top = np.float32(-np.inf)
        for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
            top = max(top, _capped(z[start + j], cap))
        top, total = block_max(top, parts), _ZERO
        for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
            total += math.exp(_capped(z[start + j], cap) - top)
        total = block_sum(total, parts)
        known = 0 <= target < n
        if cuda.threadIdx.x == 0:
            losses[i] = right[i] = _ZERO
            if known and weight != _ZERO:
                logit = _capped(z[start + target], cap)
                losses[i] = weight * (math.log(total) + top - logit)
                right[i] = _ONE if logit == top else _ZERO
            elif weight != _ZERO:
                cuda.atomic.max(fault, 0, number)
        cuda.syncthreads()  # the target's logit has been read
        if gradient:
            for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
                logit = _capped(z[start + j], cap)
                slope = _ONE - (logit / cap) * (logit / cap) if cap > _ZERO else _ONE
                p = math.exp(logit - top) / total
                share = weight * slope * (p - _ONE if j == target else p)
                z[start + j] = share if weight != _ZERO else _ZERO


def _chunk_rows(n_rows: int, n_vocab: int) -> int:
    """Rows whose logits exist at once: equal chunks."""
    most = max(16, LOGITS_BYTES // (F32.block_bytes * n_vocab))
    return -(-n_rows // -(-n_rows // most))


def _products(node: Tensor, n_rows: int, compute: Compute) -> tuple[Problem, Problem]:
    """Logits z = h·wᵀ of n_rows rows, and dh = dz·w."""
    w = node.src[1]
    n_vocab, k = w.shape
    by_token, by_column = Factor(k, 1, dtype=w.dtype), Factor(1, k, dtype=w.dtype)
    logits = Problem(n_rows, n_vocab, k, Factor(k, 1), by_token, compute=compute)
    back = Problem(n_rows, k, n_vocab, Factor(n_vocab, 1), by_column, compute=compute)
    return logits, back


def _sizes(node: Tensor) -> tuple[int, int, int]:
    """(rows, rows of a chunk, rows of the last chunk)."""
    n_rows, n_vocab = node.src[0].shape[0], node.src[1].shape[0]
    chunk = _chunk_rows(n_rows, n_vocab)
    return n_rows, chunk, n_rows % chunk or chunk


def _parts(node: Tensor) -> tuple[int, int]:
    """Bytes of scratch for the logits of a chunk, and for two numbers of each row."""
    n_rows, chunk, _ = _sizes(node)
    size, n_vocab = F32.block_bytes, node.src[1].shape[0]
    return round_up(size * chunk * n_vocab, _LINE), round_up(2 * size * n_rows, _LINE)


def _scratch(node: Tensor, compute: Compute) -> int:
    _, *chunks = _sizes(node)
    products = (p for rows in chunks for p in _products(node, rows, compute))
    return sum(_parts(node)) + max(path_of(p).scratch(p) for p in products)


def _lacks(node: Tensor) -> str | None:
    w = node.src[1]
    return None if w.is_contiguous else f"the rows of {w!r} have gaps between them"


def _bind(site: Site) -> Call:
    targets, weights = site.src[2:]
    n_rows, chunk, _ = _sizes(site.node)
    z_bytes, row_bytes = _parts(site.node)
    z = site.scratch[:z_bytes].view(np.float32)
    numbers = site.scratch[z_bytes : z_bytes + row_bytes].view(np.float32)
    losses, right = numbers[:n_rows], numbers[n_rows : 2 * n_rows]
    if site.node.shape:
        losses = site.out
    memory = site.scratch[z_bytes + row_bytes :]
    calls = []
    for first in range(0, n_rows, chunk):
        some = slice(first, min(first + chunk, n_rows))
        rows = losses[some], right[some], targets[some], weights[some]
        calls += _chunk(site, some, z, rows, memory)
    if not site.node.shape:
        calls.append(summed(site.out, losses, site.stream))
    return in_turn(*calls, summed(site.saved[0], right, site.stream))


def _chunk(site: Site, some: slice, z: Any, rows: tuple[Any, ...], memory: Any) -> list[Call]:
    """The logits of some rows, their losses, and the rows' gradients."""
    h, w = site.src[:2]
    n, (n_vocab, k) = some.stop - some.start, site.node.src[1].shape
    logits, back = _products(site.node, n, site.compute)
    of_h, z = slice(some.start * k, some.stop * k), z[: n * n_vocab]
    gradient, cap = site.node.params["gradient"], np.float32(site.node.params["softcap"])
    arguments = (z, *rows, n_vocab, cap, gradient, *target_fault(site, n_vocab))
    made = Operands(z, h[of_h], w, memory, False, site.stream)
    calls = [
        path_of(logits).bind(logits, made),
        per_row(_softmax_rows, n, n_vocab, site.stream, *arguments),
    ]
    if gradient:
        to_h = Operands(site.saved[1][of_h], z, w, memory, False, site.stream)
        calls.append(path_of(back).bind(back, to_h))
    return calls


for _name in ("linear_cross_entropy", "linear_cross_entropy_by_row"):
    declare(_name, Kernel(_bind, lacks=_lacks, scratch=_scratch))
