"""The path `rows`: few queries with extras, one row of scores after the other.

So few do not repay a matrix product's start. Keys and values are of types that `number_at` reads.
"""

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import kernel, parallel, prange
from pyggml.jit.scratch import Array, Layout, Scratch
from pyggml.jit.simd import fill
from pyggml.kernels.attention.decode_tile import READ, number_at
from pyggml.kernels.attention.extras import extras_of, scores_forward, seen_keys
from pyggml.kernels.attention.path import AttentionPath, AttentionProblem, Forward
from pyggml.kernels.attention.widen import as_bits

FEW = 8  # queries
_ZERO = np.float32(0)


@kernel
def _product(q, key):
    total = _ZERO
    for i in range(q.size):
        total += q[i] * number_at(key, i)
    return total


@parallel
def _forward(o, lse, p, q, k, v, extras):
    """One query and head after the other; p (T, H, the most keys seen) is scratch."""
    n_heads, d = q.shape[1], o.shape[2]
    repeats = n_heads // k.shape[1]
    for m in prange(q.shape[0] * n_heads):
        t, h = m // n_heads, m % n_heads
        start, stop = seen_keys(extras, t)
        row = p[t, h, : stop - start]
        for j in range(row.size):
            row[j] = _product(q[t, h], k[start + j, h // repeats])
        scores_forward(row, lse, extras, h, t, start, stop)
        fill(o[t, h], _ZERO)
        for j in range(row.size):
            value = v[start + j, h // repeats]
            for i in range(d):
                o[t, h, i] += row[j] * number_at(value, i)


# -- binding ------------------------------------------------------------------------------------


def _takes(p: AttentionProblem) -> bool:
    return p.n_queries <= FEW and p.key_type in READ and p.value_type in READ


def _layout(p: AttentionProblem) -> Layout:
    return Layout(scores=Array((p.n_queries, p.n_heads, p.n_seen)))


def _bind(p: AttentionProblem, a: Forward, scratch: Scratch) -> Call:
    keys = as_bits(a.k), as_bits(a.v)
    return Call(_forward, a.o, a.lse, scratch["scores"], a.q, *keys, extras_of(a))


FORWARD: AttentionPath[Forward] = AttentionPath("rows", False, _takes, _layout, _bind)
