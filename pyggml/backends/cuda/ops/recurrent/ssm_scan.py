"""The selective scan of Mamba 1 and 2 and its gradient: see pyggml/ops/recurrent/ssm_scan.py."""

import math

import numpy as np

from pyggml.backends.cuda.code.blocks import block_sum, first_row, rows_apart
from pyggml.backends.cuda.code.formulas import ZERO, softplus, softplus_back
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.ops.recurrent.recurrence import Factors, bind_forward, several_states
from pyggml.backends.cuda.ops.recurrent.recurrence_back import Gradient
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaSite
from pyggml.backends.cuda.runtime.launches import THREADS, in_turn, per_element, per_rows
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call
from pyggml.graph.tensor import Tensor


@device
def _read(src, sizes, t, h, j):
    """w = e^(Δ·A), k = B, r = C; there are n_a decays of a head, one or one for each column."""
    _, dt, a, b, c = src
    n_heads, _, n, n_groups, n_a = sizes
    decay = a[h * n_a + (j if n_a > 1 else 0)]
    at = (t * n_groups + h // (n_heads // n_groups)) * n + j
    return math.exp(softplus(dt[t * n_heads + h]) * decay), b[at], c[at], ZERO, ZERO


@device
def _value(src, sizes, t, h, i):
    head = t * sizes[0] + h
    return softplus(src[1][head]) * src[0][head * sizes[1] + i]


_FACTORS = Factors(_read, _value)


def _sources(site: CudaSite) -> tuple[tuple, tuple[int, ...]]:
    state, _, _, a, b, *_ = site.node.src
    n_heads, dv, dk = state.shape
    return site.src[1:6], (n_heads, dv, dk, b.shape[1], a.shape[1])


# -- the gradient -------------------------------------------------------------------------------


@kernel
def _tokens_back(dx, ddt, gw, src, sizes):
    """Of each token and head: dx = Δ·gv, where gv stands in dx, and that of dt."""
    x, dt, a, _, _ = src
    dv, dk, n_a = sizes[1], sizes[2], sizes[4]
    for head in range(cuda.grid(1), dt.size, cuda.gridsize(1)):
        delta, ddelta = softplus(dt[head]), ZERO
        for i in range(head * dv, (head + 1) * dv):
            ddelta += x[i] * dx[i]
            dx[i] *= delta
        of_a = head % sizes[0] * n_a
        for j in range(dk):
            decay = a[of_a + (j if n_a > 1 else 0)]
            ddelta += gw[head * dk + j] * math.exp(delta * decay) * decay
        ddt[head] = softplus_back(dt[head], ddelta)


@kernel
def _decays_back(da, gw, src, sizes):
    """da = Σ gw·w·Δ, over tokens, and over the columns that share a decay."""
    parts = cuda.shared.array(THREADS, np.float32)
    dt, n_heads, dk, n_a = src[1], sizes[0], sizes[2], sizes[4]
    columns = dk // n_a
    for row in range(first_row(), da.size, rows_apart()):
        h, decay, total = row // n_a, src[2][row], ZERO
        for i in range(cuda.threadIdx.x, dt.size // n_heads * columns, cuda.blockDim.x):
            head, j = i // columns * n_heads + h, row % n_a + i % columns
            delta = softplus(dt[head])
            total += gw[head * dk + j] * math.exp(delta * decay) * delta
        total = block_sum(total, parts)
        if cuda.threadIdx.x == 0:
            da[row] = total


@kernel
def _groups_back(out, sums, n, n_blocks, n_groups):
    """out (T, n_groups, n): the sums (T, n_blocks, n) of each group's blocks."""
    each = n_blocks // n_groups
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        group, total = i // n, ZERO  # of a token
        for block in range(group * each, (group + 1) * each):
            total += sums[block * n + i % n]
        out[i] = total


def _gradient(node: Tensor) -> Gradient:
    state, x, _, _, b, *_ = node.src
    return Gradient(_FACTORS, state, x.shape[0], state.shape[0] // b.shape[1])


def _bind_back(site: CudaSite) -> Call:
    gradient, (src, sizes) = _gradient(site.node), _sources(site)
    *_, positions, dy = site.src
    _, ddt, da, db, dc = site.saved
    gw, gk, gr = gradient.of_factors(site)
    _, _, dk, n_groups, n_a = sizes
    of_groups = (dk, gradient.n_blocks, n_groups)
    n_terms = ddt.size // sizes[0] * (dk // n_a)
    return in_turn(
        gradient.bind(site, positions, dy, src, sizes),
        per_element(_tokens_back, ddt.size, site.stream, site.out, ddt, gw, src, sizes),
        per_rows(_decays_back, da.size, n_terms, site.stream, da, gw, src, sizes),
        per_element(_groups_back, db.size, site.stream, db, gk, *of_groups),
        per_element(_groups_back, dc.size, site.stream, dc, gr, *of_groups),
    )


declare("ssm_scan", lambda site: bind_forward(site, _FACTORS, *_sources(site)), several_states)
declare("ssm_scan_back", _bind_back, scratch=lambda node, _: _gradient(node).n_bytes)
