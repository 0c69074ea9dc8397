"""Attention one query and head after the other: the slow twin of every other path.

It is what runs without the JIT, and its backward pass serves queries too few to fill a tile.
"""

from __future__ import annotations

import numpy as np

from pyggml._jit import kernel, parallel, prange
from pyggml._simd import dot, exp32, fill
from pyggml.attention.tiles import NOTHING


@kernel
def _row(out, q, k, v, g, start, stop, scale):
    """One query's result from head g of the keys; returns lse."""
    top, norm = np.float32(-1e30), np.float32(0)
    fill(out, np.float32(0))
    for j in range(start, stop):
        s = dot(q, k[j, g]) * scale
        if s > top:
            factor = exp32(top - s)
            norm *= factor
            for i in range(out.shape[0]):
                out[i] *= factor
            top = s
        p, row = exp32(s - top), v[j, g]
        norm += p
        for i in range(out.shape[0]):
            out[i] += p * row[i]
    if not norm > 0:
        return NOTHING
    for i in range(out.shape[0]):
        out[i] /= norm
    return top + np.log(norm)


@parallel
def forward(out, lse, q, k, v, span, scale):
    """One query and head after the other, the softmax summed as it goes."""
    n_heads = q.shape[1]
    repeats = n_heads // k.shape[1]
    for task in prange(q.shape[0] * n_heads):
        t, h = task // n_heads, task % n_heads
        g = h // repeats
        lse[h, t] = _row(out[t, h], q[t, h], k, v, g, span[t, 0], span[t, 1], scale)


@kernel
def backward(dq, dk, dv, q, k, v, span, o, lse, do, scale):
    n_queries, n_heads, d = q.shape
    repeats = n_heads // k.shape[1]
    dq[:], dk[:], dv[:] = 0, 0, 0
    for t in range(n_queries):
        for h in range(n_heads):
            g = h // repeats
            delta = np.float32(0)
            for i in range(d):
                delta += do[t, h, i] * o[t, h, i]
            for j in range(span[t, 0], span[t, 1]):
                s, dp = np.float32(0), np.float32(0)
                for i in range(d):
                    s += q[t, h, i] * k[j, g, i]
                    dp += do[t, h, i] * v[j, g, i]
                p = exp32(s * scale - lse[h, t])
                ds = p * (dp - delta) * scale
                for i in range(d):
                    dq[t, h, i] += ds * k[j, g, i]
                    dk[j, g, i] += ds * q[t, h, i]
                    dv[j, g, i] += p * do[t, h, i]
