"""Normalisation of rows, a block for each: see pyggml/ops/norm.py and norm_mul.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pyggml.backends.cuda.blocks import block_sum, first_row, rows_apart
from pyggml.backends.cuda.driver import cuda, device, kernel
from pyggml.backends.cuda.formulas import ONE, ZERO
from pyggml.backends.cuda.kernel import Kernel, Site
from pyggml.backends.cuda.launch import THREADS, in_turn, per_element, per_rows
from pyggml.backends.cuda.table import declare
from pyggml.call import Call
from pyggml.tensors import Tensor


@device
def _squares(x, at, n, parts):
    """Σ x² of the row that begins at `at`."""
    total = ZERO
    for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
        total += x[at + j] * x[at + j]
    return block_sum(total, parts)


@device
def _along(x, y, at, n, parts):
    """Σ x·y of the rows that begin at `at`."""
    total = ZERO
    for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
        total += x[at + j] * y[at + j]
    return block_sum(total, parts)


# -- rms_norm, l2_norm --------------------------------------------------------------------------


@kernel
def _rms_norm(out, x, n, eps):
    parts = cuda.shared.array(THREADS, np.float32)
    for row in range(first_row(), x.size // n, rows_apart()):
        at = row * n
        r = ONE / math.sqrt(_squares(x, at, n, parts) / np.float32(n) + eps)
        for j in range(at + cuda.threadIdx.x, at + n, cuda.blockDim.x):
            out[j] = x[j] * r


@kernel
def _rms_norm_back(dx, x, dy, n, eps):
    parts = cuda.shared.array(THREADS, np.float32)
    for row in range(first_row(), x.size // n, rows_apart()):
        at = row * n
        r = ONE / math.sqrt(_squares(x, at, n, parts) / np.float32(n) + eps)
        back = r * r * r * _along(x, dy, at, n, parts) / np.float32(n)
        for j in range(at + cuda.threadIdx.x, at + n, cuda.blockDim.x):
            dx[j] = r * dy[j] - back * x[j]


@kernel
def _l2_norm(out, x, n, eps):
    parts = cuda.shared.array(THREADS, np.float32)
    for row in range(first_row(), x.size // n, rows_apart()):
        at = row * n
        r = ONE / max(math.sqrt(_squares(x, at, n, parts)), eps)
        for j in range(at + cuda.threadIdx.x, at + n, cuda.blockDim.x):
            out[j] = x[j] * r


@kernel
def _l2_norm_back(dx, x, dy, n, eps):
    parts = cuda.shared.array(THREADS, np.float32)
    for row in range(first_row(), x.size // n, rows_apart()):
        at = row * n
        length = math.sqrt(_squares(x, at, n, parts))
        along = _along(x, dy, at, n, parts)
        r, back = ONE / eps, ZERO
        if length > eps:
            r, back = ONE / length, along / (length * length * length)
        for j in range(at + cuda.threadIdx.x, at + n, cuda.blockDim.x):
            dx[j] = r * dy[j] - back * x[j]


# -- norm ---------------------------------------------------------------------------------------


@device
def _mean_and_rate(x, at, n, eps, parts):
    """(mean, 1/sqrt(var + eps)) of a row; var is the mean of (x − mean)²."""
    total = ZERO
    for j in range(at + cuda.threadIdx.x, at + n, cuda.blockDim.x):
        total += x[j]
    mean = block_sum(total, parts) / np.float32(n)
    squares = ZERO
    for j in range(at + cuda.threadIdx.x, at + n, cuda.blockDim.x):
        squares += (x[j] - mean) * (x[j] - mean)
    return mean, ONE / math.sqrt(block_sum(squares, parts) / np.float32(n) + eps)


@kernel
def _norm(out, x, n, eps):
    parts = cuda.shared.array(THREADS, np.float32)
    for row in range(first_row(), x.size // n, rows_apart()):
        at = row * n
        mean, r = _mean_and_rate(x, at, n, eps, parts)
        for j in range(at + cuda.threadIdx.x, at + n, cuda.blockDim.x):
            out[j] = (x[j] - mean) * r


@kernel
def _norm_back(dx, x, dy, n, eps):
    parts = cuda.shared.array(THREADS, np.float32)
    for row in range(first_row(), x.size // n, rows_apart()):
        at = row * n
        mean, r = _mean_and_rate(x, at, n, eps, parts)
        total, along = ZERO, ZERO
        for j in range(at + cuda.threadIdx.x, at + n, cuda.blockDim.x):
            total += dy[j]
            along += dy[j] * (x[j] - mean)
        total = block_sum(total, parts) / np.float32(n)
        along = block_sum(along, parts) * r * r / np.float32(n)
        for j in range(at + cuda.threadIdx.x, at + n, cuda.blockDim.x):
            dx[j] = r * (dy[j] - total - (x[j] - mean) * along)


# -- rms_norm_mul -------------------------------------------------------------------------------


@kernel
def _rms_norm_mul(out, x, w, n, eps):
    parts = cuda.shared.array(THREADS, np.float32)
    for row in range(first_row(), x.size // n, rows_apart()):
        at = row * n
        r = ONE / math.sqrt(_squares(x, at, n, parts) / np.float32(n) + eps)
        for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
            out[at + j] = x[at + j] * r * w[j]


@kernel
def _rms_norm_mul_back(dx, x, w, dy, n, eps):
    parts = cuda.shared.array(THREADS, np.float32)
    for row in range(first_row(), x.size // n, rows_apart()):
        at = row * n
        r = ONE / math.sqrt(_squares(x, at, n, parts) / np.float32(n) + eps)
        total = ZERO
        for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
            total += x[at + j] * w[j] * dy[at + j]
        back = r * r * r * block_sum(total, parts) / np.float32(n)
        for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
            dx[at + j] = r * w[j] * dy[at + j] - back * x[at + j]


_CHUNK_ROWS = 64  # rows whose part of dw one block adds up


@kernel
def _rates(rates, x, n, eps):
    parts = cuda.shared.array(THREADS, np.float32)
    for row in range(first_row(), rates.size, rows_apart()):
        r = ONE / math.sqrt(_squares(x, row * n, n, parts) / np.float32(n) + eps)
        if cuda.threadIdx.x == 0:
            rates[row] = r


@kernel
def _weighted_sums(sums, x, dy, rates, n):
    """sums (n_chunks, n): of each chunk of rows, Σ r·x·dy."""
    for chunk in range(first_row(), sums.size // n, rows_apart()):
        first, last = chunk * _CHUNK_ROWS, min((chunk + 1) * _CHUNK_ROWS, rates.size)
        for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
            total = ZERO
            for row in range(first, last):
                total += rates[row] * x[row * n + j] * dy[row * n + j]
            sums[chunk * n + j] = total


@kernel
def _sum_chunks(dw, sums):
    for j in range(cuda.grid(1), dw.size, cuda.gridsize(1)):
        total = ZERO
        for at in range(j, sums.size, dw.size):
            total += sums[at]
        dw[j] = total


def _chunks(node: Tensor) -> tuple[int, int]:
    """(rows of x, chunks of them)."""
    x = node.src[0]
    n_rows = x.n_elements // x.shape[-1]
    return n_rows, -(-n_rows // _CHUNK_ROWS)


def _back_w_scratch(node: Tensor, compute: str) -> int:
    n_rows, n_chunks = _chunks(node)
    return 4 * (n_rows + n_chunks * node.shape[-1])


def _back_w(site: Site) -> Call:
    x, dy = site.src
    n, (n_rows, n_chunks) = site.node.shape[-1], _chunks(site.node)
    scratch = site.scratch.view(np.float32)
    rates, sums = scratch[:n_rows], scratch[n_rows : n_rows + n_chunks * n]
    return in_turn(
        per_rows(_rates, n_rows, n, site.stream, rates, x, n, *site.scalars),
        per_rows(_weighted_sums, n_chunks, n, site.stream, sums, x, dy, rates, n),
        per_element(_sum_chunks, n, site.stream, site.out, sums),
    )


def _by_row(run: Any) -> Callable[[Site], Call]:
    """Call run(out, *src, n, *params), n the length of a row."""

    def bind(site: Site) -> Call:
        t = site.node.src[0]
        n = t.shape[-1] if t.shape else 1
        return per_rows(
            run, t.n_elements // n, n, site.stream, site.out, *site.src, n, *site.scalars
        )

    return bind


for _name, _run in {
    "rms_norm": _rms_norm,
    "rms_norm_back": _rms_norm_back,
    "l2_norm": _l2_norm,
    "l2_norm_back": _l2_norm_back,
    "norm": _norm,
    "norm_back": _norm_back,
    "rms_norm_mul": _rms_norm_mul,
    "rms_norm_mul_back": _rms_norm_mul_back,
}.items():
    declare(_name, Kernel(_by_row(_run)))
declare("rms_norm_mul_back_w", Kernel(_back_w, scratch=_back_w_scratch))
