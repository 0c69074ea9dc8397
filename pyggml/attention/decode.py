"""Attention of a few queries over many keys, as when text is generated (flash decoding).

A task takes one query, all of its heads and a block of keys, so that keys and values are read once
and in the order they lie in. Then each head's parts are put together: of a block there are the
largest score m, Σ e^(s − m), and Σ e^(s − m) v. How the keys are cut depends on their number only.
Keys and values are float32 or, as a cache keeps them, halves.
"""

from __future__ import annotations

import numpy as np

from pyggml._jit import Code, kernel, task_code
from pyggml._simd import exp32, fill, row_max
from pyggml._tasks import (
    SLOT,
    Stage,
    floats2,
    floats3,
    frame,
    halves3,
    integer,
    ints2,
    launch,
    real,
    stage,
)
from pyggml.attention.decode_tile import KEYS, LANES, as_float, score_tile, value_tile
from pyggml.attention.tiles import NOTHING
from pyggml.call import Call
from pyggml.tensor import Shape

_FEWEST = 64  # keys of a block
_BLOCKS = 32  # at most so many
_TOP, _NORM, _SCORES = 0, 1, 2  # what stands before the scores of a head, after its D sums
_LINE = 16  # floats
_BLOCKS_AT = 8  # which argument of the tasks says how many blocks there are


def _block_keys(n_keys: int) -> int:
    """Keys of one block, of so many that a query sees."""
    return _FEWEST * max(1, -(-n_keys // (_FEWEST * _BLOCKS)))


_keys_of = kernel(_block_keys)


def parts_shape(q: Shape, k: Shape) -> Shape:
    """Scratch of `forward`: queries, blocks, heads, and a head's part of the result."""
    n = q[2] + _SCORES + _block_keys(k[0])
    return q[0], min(_BLOCKS, -(-k[0] // _FEWEST)), q[1], -(-n // _LINE) * _LINE


@kernel
def _add_scores(part, at, q, k, first, n, h, g):
    """part[h, at + j] += q[h]·k[first + j, g] over the numbers after a row's whole vectors."""
    for j in range(n):
        for i in range(q.shape[1] // LANES * LANES, q.shape[1]):
            part[h, at + j] += q[h, i] * as_float(k[first + j, g, i])


@kernel
def _add_values(part, at, v, first, n, h, g):
    """part[h, i] += Σ_j part[h, at + j] · v[first + j, g, i], likewise."""
    d = v.shape[2]
    for j in range(n):
        for i in range(d // LANES * LANES, d):
            part[h, i] += part[h, at + j] * as_float(v[first + j, g, i])


@kernel
def _soft_max(row, n, scale):
    """row = e^(scale·row − top) of its first n scores, 0 for the others; top and their sum."""
    for j in range(n):
        row[j] *= scale
    top, norm = row_max(row[:n]), np.float32(0)
    for j in range(n):
        row[j] = exp32(row[j] - top)
        norm += row[j]
    fill(row[n:], np.float32(0))
    return top, norm


@kernel
def _block(part, q, k, v, first, n, scale):
    """part (H, …) from the n keys that start at `first`; q (H, D). Heads go by two or one."""
    n_heads, d = q.shape
    repeats, at, rest = n_heads // k.shape[1], d + _SCORES, d % LANES
    row, q_row = 4 * part.shape[1], 4 * d
    to, of = part.ctypes.data, q.ctypes.data
    for j in range(0, n, KEYS):
        last = n - 1 - j
        for h in range(0, n_heads, 2 - repeats % 2):
            here = to + h * row + 4 * (at + j)
            if repeats % 2:
                score_tile(1, k, first + j, h // repeats, last, here, row, of + h * q_row, q_row)
            else:
                score_tile(2, k, first + j, h // repeats, last, here, row, of + h * q_row, q_row)
    for h in range(n_heads):
        if rest:
            _add_scores(part, at, q, k, first, n, h, h // repeats)
        scores = part[h, at : at + (n + KEYS - 1) // KEYS * KEYS]
        part[h, d + _TOP], part[h, d + _NORM] = _soft_max(scores, n, scale)
        fill(part[h, :d], np.float32(0))
    for j in range(0, n, KEYS):
        last = n - 1 - j
        for h in range(0, n_heads, 2 - repeats % 2):
            here = to + h * row
            weights = here + 4 * (at + j)
            if repeats % 2:
                value_tile(1, v, first + j, h // repeats, last, here, row, weights, row)
            else:
                value_tile(2, v, first + j, h // repeats, last, here, row, weights, row)
    for h in range(n_heads if rest else 0):
        _add_values(part, at, v, first, n, h, h // repeats)


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


def _block_tasks(halves: bool) -> Code:
    """One block of one query's keys, if it sees so many; the stage's tasks are queries · blocks."""

    def task_of_block(frame, task, thread):
        q, span, n_blocks = floats3(frame, 2), ints2(frame, 5), integer(frame, _BLOCKS_AT)
        k = halves3(frame, 3) if halves else floats3(frame, 3)
        v = halves3(frame, 4) if halves else floats3(frame, 4)
        t, b = task // n_blocks, task % n_blocks
        keys = _keys_of(span[t, 1] - span[t, 0])
        first = span[t, 0] + b * keys
        n = min(keys, span[t, 1] - first)
        if n > 0:
            _block(floats3(frame, 7)[task], q[t], k, v, first, n, real(frame, 6))

    return task_code(task_of_block)


def _join_task(frame, task, thread):
    """One head of one query."""
    out, lse, span = floats3(frame, 0), floats2(frame, 1), ints2(frame, 5)
    parts, n_blocks = floats3(frame, 7), integer(frame, _BLOCKS_AT)
    t, h = task // out.shape[1], task % out.shape[1]
    seen = max(span[t, 1] - span[t, 0], 0)
    keys = _keys_of(seen)
    used = (seen + keys - 1) // keys
    if used > 0:
        lse[h, t] = _join(out[t, h], parts[t * n_blocks : t * n_blocks + used], h)
    else:
        fill(out[t, h], np.float32(0))
        lse[h, t] = NOTHING


_FLOATS, _HALVES, _JOIN = _block_tasks(False), _block_tasks(True), task_code(_join_task)


def forward(
    out: np.ndarray, lse: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray,
    span: np.ndarray, scale: np.float32, parts: np.ndarray,
) -> Call:  # fmt: skip
    """out (T, H, D) and lse (H, T) as flash.forward makes them; parts as parts_shape says."""
    n_queries, n_blocks, n_heads, n = parts.shape
    flat = parts.reshape(n_queries * n_blocks, n_heads, n)
    sides = frame(out, lse, q, k, v, span, scale, flat, n_blocks)
    code = _HALVES if k.dtype == np.float16 else _FLOATS
    joins = stage(_JOIN, sides, n_queries * n_heads)
    return Call(_launch_seen, span, code.address, sides, joins)


def _launch_seen(span: np.ndarray, code: int, sides: np.ndarray, joins: Stage) -> None:
    """No tasks for keys that no query sees: of a cache half full they would be one thread's."""
    seen = [max(stop - start, 0) for start, stop in span.tolist()]
    n_blocks = max(-(-n // _block_keys(n)) for n in seen)
    sides[_BLOCKS_AT * SLOT] = n_blocks
    launch((code, sides.ctypes.data, len(seen) * n_blocks, sides), joins)
