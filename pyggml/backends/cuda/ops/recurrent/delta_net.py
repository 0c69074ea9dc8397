"""The gated delta net of Qwen 3 Next and Kimi, and its gradient: see ops/recurrent/delta_net.py."""

import math

import numpy as np

from pyggml.backends.cuda.code.formulas import ONE, ZERO
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.ops.recurrent.recurrence import Factors, bind_forward, several_states
from pyggml.backends.cuda.ops.recurrent.recurrence_back import Gradient
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaSite
from pyggml.backends.cuda.runtime.launches import in_turn, per_element
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call
from pyggml.graph.tensor import Tensor


@device
def _read(src, sizes, t, h, j):
    """w = e^g, k = b = k, r = q / √D, a = −β·w·k; there are n_g gates of a head, one or D."""
    q, k, _, g, beta = src
    n_heads, n_keys, d, n_g, scale = sizes
    head, at = t * n_heads + h, (t * n_keys + h % n_keys) * d + j
    w = math.exp(g[head * n_g + (j if n_g > 1 else 0)])
    return w, k[at], q[at] * scale, -beta[head] * w * k[at], k[at]


@device
def _value(src, sizes, t, h, i):
    head = t * sizes[0] + h
    return src[4][head] * src[2][head * sizes[2] + i]


_FACTORS = Factors(_read, _value, coupled=True)


def _sources(site: CudaSite) -> tuple[tuple, tuple]:
    """(q, k, v, g, β) and (H, key heads, D, gates of a head, 1 / √D)."""
    _, _, k, v, g, *_ = site.node.src
    n_tokens, n_heads, d = v.shape
    n_g = g.n_elements // (n_tokens * n_heads)
    return site.src[1:6], (n_heads, k.shape[1], d, n_g, ONE / np.sqrt(np.float32(d)))


# -- the gradient -------------------------------------------------------------------------------


@kernel
def _keys_back(dq, dk, ga, gb, gk, gr, src, sizes):
    """dq and dk: sums over the heads of a key."""
    _, _, _, g, beta = src
    n_heads, n_keys, d, n_g, scale = sizes
    for i in range(cuda.grid(1), dk.size, cuda.gridsize(1)):
        j, key, t = i % d, i // d % n_keys, i // (d * n_keys)
        of_q, of_k = ZERO, ZERO
        for h in range(key, n_heads, n_keys):
            head = t * n_heads + h
            at, w = head * d + j, math.exp(g[head * n_g + (j if n_g > 1 else 0)])
            of_k += gk[at] + gb[at] - beta[head] * w * ga[at]
            of_q += gr[at]
        dq[i], dk[i] = scale * of_q, of_k


@kernel
def _heads_back(dv, dg, dbeta, gw, ga, src, sizes):
    """Of each token and head: dv = β·gv, where gv stands in dv, and those of g and β."""
    _, k, v, g, beta = src
    n_heads, n_keys, d, n_g, _ = sizes
    for head in range(cuda.grid(1), beta.size, cuda.gridsize(1)):
        t, key = head // n_heads, head % n_heads % n_keys
        strength, of_beta, of_gate = beta[head], ZERO, ZERO
        for j in range(d):
            at, gate = head * d + j, head * n_g + (j if n_g > 1 else 0)
            w, of_key = math.exp(g[gate]), ga[at] * k[(t * n_keys + key) * d + j]
            of_beta += dv[at] * v[at] - w * of_key
            dv[at] *= strength
            change = w * (gw[at] - strength * of_key)
            of_gate = change if n_g > 1 else of_gate + change
            dg[gate] = of_gate
        dbeta[head] = of_beta


def _gradient(node: Tensor) -> Gradient:
    return Gradient(_FACTORS, node.src[0], node.shape[0])


def _bind_back(site: CudaSite) -> Call:
    gradient, (src, sizes) = _gradient(site.node), _sources(site)
    *_, positions, dy = site.src
    _, dq, dk, dg, dbeta = site.saved
    gw, gk, gr, ga, gb = gradient.of_factors(site)
    return in_turn(
        gradient.bind(site, positions, dy, src, sizes),
        per_element(_keys_back, dk.size, site.stream, dq, dk, ga, gb, gk, gr, src, sizes),
        per_element(_heads_back, dbeta.size, site.stream, site.out, dg, dbeta, gw, ga, src, sizes),
    )


declare(
    "gated_delta_net", lambda site: bind_forward(site, _FACTORS, *_sources(site)), several_states
)
declare("gated_delta_net_back", _bind_back, scratch=lambda node, _: _gradient(node).n_bytes)
