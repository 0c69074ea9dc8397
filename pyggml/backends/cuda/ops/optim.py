"""One step of an optimiser, in place, and the limit of the gradient's norm."""

import math

import numpy as np

from pyggml.backends.cuda.code.blocks import block_sum, first_row, rows_apart
from pyggml.backends.cuda.code.formulas import ONE, ZERO
from pyggml.backends.cuda.code.jit import kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaKernel, CudaSite
from pyggml.backends.cuda.runtime.launches import (
    THREADS,
    in_turn,
    per_element,
    per_result,
    per_row,
    per_rows,
)
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call

_PIECE = 1 << 14  # numbers whose squares one block adds up


@kernel
def _squares(sums, g):
    """sums: of each piece of g, Σ g² in float64."""
    parts = cuda.shared.array(THREADS, np.float64)
    for piece in range(first_row(), sums.size, rows_apart()):
        last, total = min((piece + 1) * _PIECE, g.size), np.float64(0)
        for i in range(piece * _PIECE + cuda.threadIdx.x, last, cuda.blockDim.x):
            total += np.float64(g[i]) * np.float64(g[i])
        total = block_sum(total, parts)
        if cuda.threadIdx.x == 0:
            sums[piece] = total


@kernel
def _norm(out, sums):
    parts = cuda.shared.array(THREADS, np.float64)
    total = np.float64(0)
    for i in range(cuda.threadIdx.x, sums.size, cuda.blockDim.x):
        total += sums[i]
    total = block_sum(total, parts)
    if cuda.threadIdx.x == 0:
        out[0] = math.sqrt(total)


@kernel
def _shorten(g, norm, limit):
    if norm[0] > limit and norm[0] < math.inf:
        factor = np.float32(np.float64(limit) / np.float64(norm[0]))
        for i in range(cuda.grid(1), g.size, cuda.gridsize(1)):
            g[i] *= factor


def _clip_norm(site: CudaSite) -> Call:
    (g,), (limit,) = site.src, site.scalars
    sums = site.scratch.view(np.float64)
    calls = [
        per_rows(_squares, sums.size, _PIECE, site.stream, sums, g),
        per_row(_norm, 1, sums.size, site.stream, site.out, sums),
    ]
    if limit:
        calls.append(per_element(_shorten, g.size, site.stream, g, site.out, limit))
    return in_turn(*calls)


@kernel
def _adamw(out, p, g, m, v, s):
    """s = [α, β1, β2, ε, wd, β1h, β2h]; out and p are the same memory."""
    alpha, beta1, beta2 = s[0], s[1], s[2]
    keep = ONE - alpha * s[4]
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        first = m[i] * beta1 + g[i] * (ONE - beta1)
        second = v[i] * beta2 + g[i] * g[i] * (ONE - beta2)
        m[i], v[i] = first, second
        out[i] = p[i] * keep - alpha * (first * s[5]) / (math.sqrt(second * s[6]) + s[3])


@kernel
def _lion(out, p, g, m, s):
    """s = [α, β1, β2, wd]; out and p are the same memory."""
    alpha, beta1, beta2 = s[0], s[1], s[2]
    keep = ONE - alpha * s[3]
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        along = m[i] * beta1 + g[i] * (ONE - beta1)
        out[i] = p[i] * keep - alpha * (np.float32(along > ZERO) - np.float32(along < ZERO))
        m[i] = m[i] * beta2 + g[i] * (ONE - beta2)


@kernel
def _sgd(out, p, g, s):
    """s = [α, wd]; out and p are the same memory."""
    keep = ONE - s[0] * s[1]
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = p[i] * keep - s[0] * g[i]


def _step(run):
    def bind(site: CudaSite) -> Call:
        return per_result(run, site)

    return bind


def _clip_scratch(node, compute):
    return 8 * -(-node.src[0].n_elements // _PIECE)


declare("clip_norm", CudaKernel(_clip_norm, scratch=_clip_scratch))
for _name, _run in {"opt_step_adamw": _adamw, "opt_step_lion": _lion, "opt_step_sgd": _sgd}.items():
    declare(_name, CudaKernel(_step(_run)))
