"""Softmax of rows with mask, ALiBi and sinks, and causal masks."""

import math
from collections.abc import Callable

import numpy as np

from pyggml.backends.cuda.code.axes import sizes
from pyggml.backends.cuda.code.blocks import block_max, block_sum, first_row, rows_apart
from pyggml.backends.cuda.code.formulas import ONE, ZERO
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaKernel, CudaSite
from pyggml.backends.cuda.runtime.launches import THREADS, per_element, per_rows
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call
from pyggml.ops.attention.positions import score_tables

_MINUS_INF = np.float32(-math.inf)


@device
def _score(x, mask, at, row_mask, j, scale, slope, has_mask):
    z = x[at + j] * scale
    return z + mask[row_mask + j] * slope if has_mask else z


@kernel
def _soft_max(y, x, mask, sinks, lost, slopes, scale, has_mask, shape, of_mask):
    """x, y (n_batch, n_head, n_q, n_k); the mask's first two sizes divide theirs. `lost` takes the
    sink's share of each row; it may have no element. y may be x."""
    parts = cuda.shared.array(THREADS, np.float32)
    n_head, n_q, n = shape[1], shape[2], shape[3]
    for row in range(first_row(), shape[0] * n_head * n_q, rows_apart()):
        b, h, q = row // (n_head * n_q), row // n_q % n_head, row % n_q
        at, slope, sink = row * n, slopes[h], sinks[h]
        row_mask = (((b % of_mask[0]) * of_mask[1] + h % of_mask[1]) * n_q + q) * n
        top = sink
        for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
            top = max(top, _score(x, mask, at, row_mask, j, scale, slope, has_mask))
        top = block_max(top, parts)
        if top == _MINUS_INF:
            top = ZERO
        total = ZERO
        for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
            e = math.exp(_score(x, mask, at, row_mask, j, scale, slope, has_mask) - top)
            y[at + j] = e
            total += e
        away = math.exp(sink - top)
        total = block_sum(total, parts) + away
        share = ONE / total if total > ZERO else ZERO
        for j in range(cuda.threadIdx.x, n, cuda.blockDim.x):
            y[at + j] *= share
        if lost.size > 0 and cuda.threadIdx.x == 0:
            lost[row] = away * share


def _bind(site: CudaSite) -> Call:
    x, *extras = site.node.src
    p = site.node.params
    shape = sizes(x.shape)
    n_head = int(shape[1])
    has_mask = bool(p["masked"])
    mask, slopes, sinks = score_tables(p, site.src[1:], n_head, site.constant)
    of_mask = sizes(extras[0].shape) if has_mask else sizes(())
    lost = site.saved[0] if site.saved else site.scratch.view(np.float32)
    arguments = (mask, sinks, lost, slopes, np.float32(p["scale"]), has_mask, shape, of_mask)
    n_rows = x.n_elements // x.shape[-1]
    return per_rows(_soft_max, n_rows, x.shape[-1], site.stream, site.out, site.src[0], *arguments)


@kernel
def _diag_mask(out, x, n_rows, n, n_past, fill):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = x[i] if i % n <= n_past + i // n % n_rows else fill


def _causal(fill: float) -> Callable[[CudaSite], Call]:
    def bind(site: CudaSite) -> Call:
        *_, n_rows, n = site.node.shape
        arguments = (n_rows, n, site.node.params["n_past"], np.float32(fill))
        return per_element(_diag_mask, site.out.size, site.stream, site.out, *site.src, *arguments)

    return bind


declare("soft_max", CudaKernel(_bind))
declare("diag_mask_inf", CudaKernel(_causal(-math.inf)))
declare("diag_mask_zero", CudaKernel(_causal(0.0)))
