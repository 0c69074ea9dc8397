"""Attention of a few queries over many keys, as when text is generated (flash decoding).

A task takes one query, all of its heads and a block of keys, so that keys and values are read once
and in the order they lie in. Then each head's parts are put together: of a block there are the
largest score m, Σ e^(s − m), and Σ e^(s − m) v. How the keys are cut depends on their number only.
"""

from __future__ import annotations

import numpy as np

from pyggml._jit import kernel, task_code
from pyggml._simd import dot, exp32, fill, row_max
from pyggml._tasks import floats2, floats3, frame, integer, ints2, launch, real, stage
from pyggml.gemm.attend import NOTHING
from pyggml.tensor import Call, Shape

_FEWEST = 64  # keys of a block
_BLOCKS = 32  # at most so many
_TOP, _NORM, _SCORES = 0, 1, 2  # what stands before the scores of a head, after its D sums


def _block_keys(n_keys: int) -> int:
    """Keys of one block."""
    return _FEWEST * max(1, -(-n_keys // (_FEWEST * _BLOCKS)))


def parts_shape(q: Shape, k: Shape) -> Shape:
    """Scratch of `forward`: queries, blocks, heads, and a head's part of the result."""
    keys = _block_keys(k[0])
    return q[0], -(-k[0] // keys), q[1], q[2] + _SCORES + keys


@kernel
def _add_values(out, weights, v, first, g):
    """out += Σ_j weights[j] · v[first + j, g]; four of them, the usual case, in one go over out."""
    if weights.size == 4:
        a, b, c, d = weights[0], weights[1], weights[2], weights[3]
        va, vb, vc, vd = v[first, g], v[first + 1, g], v[first + 2, g], v[first + 3, g]
        for i in range(out.size):
            out[i] += (a * va[i] + b * vb[i]) + (c * vc[i] + d * vd[i])
        return
    for j in range(weights.size):
        value = v[first + j, g]
        for i in range(out.size):
            out[i] += weights[j] * value[i]


@kernel
def _block(part, q, k, v, first, n, scale):
    """part (H, …) from the n keys that start at `first`; q (H, D)."""
    n_heads, d = q.shape
    repeats = n_heads // k.shape[1]
    at = d + _SCORES
    for j in range(n):
        for h in range(n_heads):
            part[h, at + j] = dot(q[h], k[first + j, h // repeats])
    for h in range(n_heads):
        row = part[h, at : at + n]
        for j in range(n):
            row[j] *= scale
        top, norm = row_max(row), np.float32(0)
        for j in range(n):
            row[j] = exp32(row[j] - top)
            norm += row[j]
        part[h, d + _TOP], part[h, d + _NORM] = top, norm
        fill(part[h, :d], np.float32(0))
    for j in range(0, n, 4):
        for h in range(n_heads):
            weights = part[h, at + j : at + min(j + 4, n)]
            _add_values(part[h, :d], weights, v, first + j, h // repeats)


@kernel
def _join(out, parts, h):
    """One head's result from its parts (n, H, …), of which there is one or more; returns lse."""
    d = out.size
    top = parts[0, h, d + _TOP]
    for b in range(1, parts.shape[0]):
        top = max(top, parts[b, h, d + _TOP])
    norm = np.float32(0)
    fill(out, norm)
    for b in range(parts.shape[0]):
        factor = exp32(parts[b, h, d + _TOP] - top)
        norm += factor * parts[b, h, d + _NORM]
        row = parts[b, h]
        for i in range(d):
            out[i] += factor * row[i]
    for i in range(d):
        out[i] /= norm
    return top + np.log(norm)


def _block_task(frame, task, thread):
    """One block of one query's keys, if it sees so many."""
    q, k, v, span = floats3(frame, 2), floats3(frame, 3), floats3(frame, 4), ints2(frame, 5)
    keys, n_blocks = integer(frame, 8), integer(frame, 9)
    t, b = task // n_blocks, task % n_blocks
    first = span[t, 0] + b * keys
    n = min(keys, span[t, 1] - first)
    if n > 0:
        _block(floats3(frame, 7)[task], q[t], k, v, first, n, real(frame, 6))


def _join_task(frame, task, thread):
    """One head of one query."""
    out, lse, span = floats3(frame, 0), floats2(frame, 1), ints2(frame, 5)
    parts, keys, n_blocks = floats3(frame, 7), integer(frame, 8), integer(frame, 9)
    t, h = task // out.shape[1], task % out.shape[1]
    used = (max(span[t, 1] - span[t, 0], 0) + keys - 1) // keys
    if used > 0:
        lse[h, t] = _join(out[t, h], parts[t * n_blocks : t * n_blocks + used], h)
    else:
        fill(out[t, h], np.float32(0))
        lse[h, t] = NOTHING


_BLOCK, _JOIN = task_code(_block_task), task_code(_join_task)


def forward(
    out: np.ndarray, lse: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray,
    span: np.ndarray, scale: np.float32, parts: np.ndarray,
) -> Call:  # fmt: skip
    """out (T, H, D) and lse (H, T) as flash.forward makes them; parts as parts_shape says."""
    n_queries, n_blocks, n_heads, n = parts.shape
    flat = parts.reshape(n_queries * n_blocks, n_heads, n)
    sides = frame(out, lse, q, k, v, span, scale, flat, _block_keys(len(k)), n_blocks)
    blocks = stage(_BLOCK, sides, n_queries * n_blocks)
    return launch, (blocks, stage(_JOIN, sides, n_queries * n_heads))
