"""Normalisation of rows, a block for each: see pyggml/ops/norm/norm.py."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.blocks import block_sum, first_row, rows_apart
from pyggml.backends.cuda.code.formulas import ONE, ZERO
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaKernel, CudaSite
from pyggml.backends.cuda.runtime.launches import THREADS, per_rows
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call
from pyggml.graph.tensor import Tensor


@device
def squares(x, at, n, parts):
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
        r = ONE / math.sqrt(squares(x, at, n, parts) / np.float32(n) + eps)
        for j in range(at + cuda.threadIdx.x, at + n, cuda.blockDim.x):
            out[j] = x[j] * r


@kernel
def _rms_norm_back(dx, x, dy, n, eps):
    parts = cuda.shared.array(THREADS, np.float32)
    for row in range(first_row(), x.size // n, rows_apart()):
        at = row * n
        r = ONE / math.sqrt(squares(x, at, n, parts) / np.float32(n) + eps)
        back = r * r * r * _along(x, dy, at, n, parts) / np.float32(n)
        for j in range(at + cuda.threadIdx.x, at + n, cuda.blockDim.x):
            dx[j] = r * dy[j] - back * x[j]


@kernel
def _l2_norm(out, x, n, eps):
    parts = cuda.shared.array(THREADS, np.float32)
    for row in range(first_row(), x.size // n, rows_apart()):
        at = row * n
        r = ONE / max(math.sqrt(squares(x, at, n, parts)), eps)
        for j in range(at + cuda.threadIdx.x, at + n, cuda.blockDim.x):
            out[j] = x[j] * r


@kernel
def _l2_norm_back(dx, x, dy, n, eps):
    parts = cuda.shared.array(THREADS, np.float32)
    for row in range(first_row(), x.size // n, rows_apart()):
        at = row * n
        length = math.sqrt(squares(x, at, n, parts))
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


def _by_row(run: Any) -> Callable[[CudaSite], Call]:
    """Call run(out, *src, n, *params), n the length of a row."""

    def bind(site: CudaSite) -> Call:
        t = site.node.src[0]
        n = t.shape[-1] if t.shape else 1
        return per_rows(
            run, t.n_elements // n, n, site.stream, site.out, *site.src, n, *site.scalars
        )

    return bind


def _by_group(run: Any) -> Callable[[CudaSite], Call]:
    """The same for rows that are runs of channels; params begin with how many there are."""

    def bind(site: CudaSite) -> Call:
        n_groups, *params = site.scalars
        t = site.node
        n_rows = (t.shape[0] if len(t.shape) == 4 else 1) * n_groups
        n = t.n_elements // n_rows
        return per_rows(run, n_rows, n, site.stream, site.out, *site.src, n, *params)

    return bind


def _uneven_groups(node: Tensor) -> str | None:
    return "groups of unequal sizes" if node.shape[-3] % node.params["n_groups"] else None


for _name, _run in {
    "rms_norm": _rms_norm,
    "rms_norm_back": _rms_norm_back,
    "l2_norm": _l2_norm,
    "l2_norm_back": _l2_norm_back,
    "norm": _norm,
    "norm_back": _norm_back,
}.items():
    declare(_name, CudaKernel(_by_row(_run)))
declare("group_norm", CudaKernel(_by_group(_norm), _uneven_groups))
declare("group_norm_back", CudaKernel(_by_group(_norm_back), _uneven_groups))
