"""The path `decode`: attention of a few queries over many keys, as when text is generated.

The keys that a query sees are split (flash decoding, Dao et al. 2023). A task takes one query, all
of its heads and one split, so that keys and values are read once, in memory order. It leaves the
largest score m, Σ e^(s − m) and Σ e^(s − m) v of each head. Then each head's splits are joined. The
split depends on the number of keys only. Keys and values are float32 or, as in a cache, float16.
"""

import numpy as np

from pyggml.graph.call import Call
from pyggml.graph.dtypes import F16, F32, Q8_0
from pyggml.jit import kernel
from pyggml.jit.frames import Bytes3, Float, Floats2, Floats3, Frame, Int, Ints2, Shorts3
from pyggml.jit.scratch import Array, Layout, Scratch
from pyggml.jit.simd import exp32, fill, row_max
from pyggml.jit.tasks import Stage, launch, stage, task_code
from pyggml.kernels.attention.decode_tile import (
    KEYS,
    LANES,
    Keys,
    Rows,
    number_at,
    score_tile,
    value_tile,
)
from pyggml.kernels.attention.path import Forward, Path, Problem
from pyggml.kernels.attention.softmax import NO_KEYS
from pyggml.kernels.attention.tiles import MR
from pyggml.kernels.attention.widen import as_bits
from pyggml.kernels.gemm.panels import rounded_up
from pyggml.sizes import round_up

_FEWEST_KEYS = 64  # of a split
_MOST_SPLITS = 32
_TOP, _NORM, _SCORES = 0, 1, 2  # in a head's part, after its D sums: m, Σ e^(s − m), scores
_LINE = 16  # floats of a cache line


class Decode(Frame):
    """The fields for keys of either type."""

    o: Floats3
    lse: Floats2
    q: Floats3
    span: Ints2
    scale: Float
    parts: Floats3  # of query t and split i: (H, D sums, m, Σ, the scores) at t · n_splits + i
    n_splits: Int  # of the query that sees the most keys


class DecodeF32(Decode):
    """Keys and values in float32."""

    k: Floats3
    v: Floats3


class DecodeF16(Decode):
    """Keys and values in float16, as bits."""

    k: Shorts3
    v: Shorts3


class DecodeQ8(Decode):
    """Keys and values in Q8_0, as bytes."""

    k: Bytes3
    v: Bytes3


def _split_keys(n_keys: int) -> int:
    """How many keys one split has, if a query sees n_keys."""
    return _FEWEST_KEYS * max(1, -(-n_keys // (_FEWEST_KEYS * _MOST_SPLITS)))


_keys_of = kernel(_split_keys)


@kernel
def _add_scores(part, at, q, k, first, n, h, g):
    """part[h, at + j] += q[h]·k[first + j, g] over the numbers after a key's whole vectors."""
    for j in range(n):
        for i in range(q.shape[1] // LANES * LANES, q.shape[1]):
            part[h, at + j] += q[h, i] * number_at(k[first + j, g], i)


@kernel
def _add_values(part, at, d, v, first, n, h, g):
    """part[h, i] += Σ_j part[h, at + j] · v[first + j, g, i], likewise."""
    for j in range(n):
        for i in range(d // LANES * LANES, d):
            part[h, i] += part[h, at + j] * number_at(v[first + j, g], i)


@kernel
def _softmax(row, n, scale):
    """row = e^(scale·row − top) for its first n scores, 0 for the others. Returns (top, sum)."""
    for j in range(n):
        row[j] *= scale
    top, norm = row_max(row[:n]), np.float32(0)
    for j in range(n):
        row[j] = exp32(row[j] - top)
        norm += row[j]
    fill(row[n:], np.float32(0))
    return top, norm


@kernel
def _one_split(part, q, k, v, first, n, scale):
    """part (H, …) for the keys first … first + n; q (H, D). Heads are taken by twos, or one."""
    n_heads, d = q.shape
    repeats, at, rest = n_heads // k.shape[1], d + _SCORES, d % LANES
    row, q_row = 4 * part.shape[1], 4 * d
    to, of = part.ctypes.data, q.ctypes.data
    for j in range(0, n, KEYS):
        last = n - 1 - j
        for h in range(0, n_heads, 2 - repeats % 2):
            keys = Keys(first + j, h // repeats, last)
            scores, queries = Rows(to + h * row + 4 * (at + j), row), Rows(of + h * q_row, q_row)
            if repeats % 2:
                score_tile(1, k, keys, scores, queries)
            else:
                score_tile(2, k, keys, scores, queries)
    for h in range(n_heads):
        if rest:
            _add_scores(part, at, q, k, first, n, h, h // repeats)
        own = part[h, at : at + rounded_up(n, KEYS)]
        part[h, d + _TOP], part[h, d + _NORM] = _softmax(own, n, scale)
        fill(part[h, :d], np.float32(0))
    for j in range(0, n, KEYS):
        last = n - 1 - j
        for h in range(0, n_heads, 2 - repeats % 2):
            keys = Keys(first + j, h // repeats, last)
            sums, weights = Rows(to + h * row, row), Rows(to + h * row + 4 * (at + j), row)
            if repeats % 2:
                value_tile(1, v, keys, sums, weights)
            else:
                value_tile(2, v, keys, sums, weights)
    for h in range(n_heads if rest else 0):
        _add_values(part, at, d, v, first, n, h, h // repeats)


@kernel
def _join(o, parts, h):
    """o = one head's result, made of its parts (n, H, …), n >= 1. Returns lse."""
    d = o.size
    top = parts[0, h, d + _TOP]
    for b in range(1, parts.shape[0]):
        top = max(top, parts[b, h, d + _TOP])
    norm = np.float32(0)
    fill(o, norm)
    for b in range(parts.shape[0]):
        factor = exp32(parts[b, h, d + _TOP] - top)
        norm += factor * parts[b, h, d + _NORM]
        row = parts[b, h]
        for i in range(d):
            o[i] += factor * row[i]
    for i in range(d):
        o[i] /= norm
    return top + np.log(norm)


def _split_task(f, task, thread):
    """One split of one query's keys; nothing if the query sees fewer. Neighbouring tasks are of
    different queries, so that every thread gets some with many keys."""
    t, i = task % f.q.shape[0], task // f.q.shape[0]
    start, stop = f.span[t, 0], f.span[t, 1]
    n_keys = _keys_of(stop - start)
    first = start + i * n_keys
    n = min(n_keys, stop - first)
    if n > 0:
        _one_split(f.parts[t * f.n_splits + i], f.q[t], f.k, f.v, first, n, f.scale)


_SPLITS = {
    kind: (task_code(frame)(_split_task), frame)
    for kind, frame in ((F32, DecodeF32), (F16, DecodeF16), (Q8_0, DecodeQ8))
}


@task_code(Decode)
def _join_task(f, task, thread):
    """One head of one query."""
    t, h = task // f.o.shape[1], task % f.o.shape[1]
    n_seen = max(f.span[t, 1] - f.span[t, 0], 0)
    n_keys = _keys_of(n_seen)
    n_parts, first = (n_seen + n_keys - 1) // n_keys, t * f.n_splits
    if n_parts > 0:
        f.lse[h, t] = _join(f.o[t, h], f.parts[first : first + n_parts], h)
    else:
        fill(f.o[t, h], np.float32(0))
        f.lse[h, t] = NO_KEYS


# -- binding ------------------------------------------------------------------------------------


def _takes(p: Problem) -> bool:
    return not p.has_extras and p.n_queries < MR


def _layout(p: Problem) -> Layout:
    n = p.head_size + _SCORES + _split_keys(p.n_seen)
    n_splits = min(_MOST_SPLITS, -(-p.n_seen // _FEWEST_KEYS))
    return Layout(parts=Array((p.n_queries * n_splits, p.n_heads, round_up(n, _LINE))))


def _bind(p: Problem, a: Forward, scratch: Scratch) -> Call:
    code, frame = _SPLITS[p.key_type]
    f = frame(
        o=a.o, lse=a.lse, q=a.q, k=as_bits(a.k), v=as_bits(a.v), span=a.span, scale=float(a.scale),
        n_splits=1, **scratch,
    )  # fmt: skip
    joins = stage(_join_task, f, p.n_queries * p.n_heads)
    return Call(_launch_seen, a.span, f, stage(code, f, 0), joins)


def _launch_seen(span: np.ndarray, f: Decode, splits: Stage, joins: Stage) -> None:
    """Launch tasks only for keys that some query sees. In a half-filled cache, one thread would get
    all tasks without keys."""
    seen = [max(stop - start, 0) for start, stop in span.tolist()]
    n_splits = max(-(-n // _split_keys(n)) for n in seen)
    f.put(n_splits=n_splits)
    code, address, _, _ = splits
    launch((code, address, len(seen) * n_splits, f), joins)


FORWARD: Path[Forward] = Path("decode", True, _takes, _layout, _bind)
