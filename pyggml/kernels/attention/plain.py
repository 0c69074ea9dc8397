"""The path `plain`: one query and head after the other, the reference of flash and decode.

It serves without the JIT. Its backward pass also serves queries too few to fill a tile.
"""

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import kernel, parallel, prange
from pyggml.jit.scratch import Scratch
from pyggml.jit.simd import dot, exp32, fill
from pyggml.kernels.attention.path import (
    AttentionPath,
    AttentionProblem,
    Backward,
    Forward,
    no_scratch,
)
from pyggml.kernels.attention.softmax import MASKED, NO_KEYS


@kernel
def _row(o, q, k, v, g, start, stop, scale):
    """o = one query's attention over key head g. Returns lse."""
    top, norm = MASKED, np.float32(0)
    fill(o, np.float32(0))
    for j in range(start, stop):
        s = dot(q, k[j, g]) * scale
        if s > top:
            factor = exp32(top - s)
            norm *= factor
            for i in range(o.shape[0]):
                o[i] *= factor
            top = s
        p, row = exp32(s - top), v[j, g]
        norm += p
        for i in range(o.shape[0]):
            o[i] += p * row[i]
    if not norm > 0:
        return NO_KEYS
    for i in range(o.shape[0]):
        o[i] /= norm
    return top + np.log(norm)


@parallel
def _forward(o, lse, q, k, v, span, scale):
    """One query and head after the other, the softmax summed as it goes."""
    n_heads = q.shape[1]
    repeats = n_heads // k.shape[1]
    for task in prange(q.shape[0] * n_heads):
        t, h = task // n_heads, task % n_heads
        g = h // repeats
        lse[h, t] = _row(o[t, h], q[t, h], k, v, g, span[t, 0], span[t, 1], scale)


@kernel
def _backward(dq, dk, dv, q, k, v, span, o, lse, do, scale):
    n_queries, n_heads, d = q.shape
    repeats, of_values = n_heads // k.shape[1], v.shape[2]
    dq[:], dk[:], dv[:] = 0, 0, 0
    for t in range(n_queries):
        for h in range(n_heads):
            g = h // repeats
            delta = np.float32(0)
            for i in range(of_values):
                delta += do[t, h, i] * o[t, h, i]
            for j in range(span[t, 0], span[t, 1]):
                s, dp = np.float32(0), np.float32(0)
                for i in range(d):
                    s += q[t, h, i] * k[j, g, i]
                for i in range(of_values):
                    dp += do[t, h, i] * v[j, g, i]
                p = exp32(s * scale - lse[h, t])
                ds = p * (dp - delta) * scale
                for i in range(d):
                    dq[t, h, i] += ds * k[j, g, i]
                    dk[j, g, i] += ds * q[t, h, i]
                for i in range(of_values):
                    dv[j, g, i] += p * do[t, h, i]


# -- binding ------------------------------------------------------------------------------------


def _takes(p: AttentionProblem) -> bool:
    return not p.has_extras and p.reads_floats


def _bind_forward(p: AttentionProblem, a: Forward, scratch: Scratch) -> Call:
    return Call(_forward, a.o, a.lse, a.q, a.k, a.v, a.span, a.scale)


def _bind_backward(p: AttentionProblem, a: Backward, scratch: Scratch) -> Call:
    return Call(_backward, a.dq, a.dk, a.dv, a.q, a.k, a.v, a.span, a.o, a.lse, a.do, a.scale)


FORWARD: AttentionPath[Forward] = AttentionPath("plain", False, _takes, no_scratch, _bind_forward)
BACKWARD: AttentionPath[Backward] = AttentionPath(
    "plain", False, _takes, no_scratch, _bind_backward
)
