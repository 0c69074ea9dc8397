"""The path `decode`: attention of a few queries over many keys, as when text is generated.

The keys that a query sees are split (flash decoding, Dao et al. 2023). A task takes one query and
one split, so that keys and values are read once, in memory order: for all heads or, where threads
would be without a task, for some. It leaves the largest score m, Σ e^(s − m) and Σ e^(s − m) v of
each head. Then each head's splits are joined, by the same task where there is one split alone. The
split depends on the number of keys only.

Keys and values that are both float32, both float16 or both Q8_0 are read as they lie. Those of
other types, or of two, are unpacked as far as a query sees them, CHUNK keys at a time.
"""

from typing import Any

import numpy as np

from pyggml.graph.call import Call
from pyggml.graph.dtypes import F16, F32, Q8_0
from pyggml.jit import kernel
from pyggml.jit.cores import n_cores
from pyggml.jit.frames import (
    Bytes2,
    Bytes3,
    Float,
    Floats2,
    Floats3,
    Floats4,
    Frame,
    Int,
    Ints1,
    Ints2,
    Longs1,
    Shorts3,
)
from pyggml.jit.scratch import Array, Layout, Scratch, per_thread
from pyggml.jit.simd import exp32, fill
from pyggml.jit.tasks import TaskStage, launch, stage, task_code
from pyggml.kernels.attention.decode_tile import (
    KEYS,
    LANES,
    HeadRows,
    Keys,
    number_at,
    score_tile,
    value_tile,
)
from pyggml.kernels.attention.flash_tile import MR
from pyggml.kernels.attention.path import AttentionPath, AttentionProblem, Forward, SomeQueries
from pyggml.kernels.attention.row_softmax import LANES as ROW_LANES
from pyggml.kernels.attention.row_softmax import row_top, row_weights
from pyggml.kernels.attention.softmax import NO_KEYS
from pyggml.kernels.attention.widen import as_bits, as_bytes
from pyggml.kernels.gemm.microkernel import call_block
from pyggml.kernels.gemm.panels import rounded_up
from pyggml.quants import UNPACK
from pyggml.sizes import round_up

_FEWEST_KEYS = 64  # of a split
_MOST_SPLITS = 32
_TASKS = 2  # of a thread, if heads are enough
_CHUNK = 32  # keys that are unpacked at once; whole tiles
_TOP, _NORM, _SCORES = 0, 1, 2  # in a head's part, after its DV sums: m, Σ e^(s − m), scores
_LINE = 16  # floats of a cache line
_QUERIES, _SPLITS_OF_ONE, _SPLIT_TASKS, _JOIN_TASKS = range(4)  # in Decode.counts


class Decode(Frame):
    """The fields for keys of every type."""

    o: Floats3
    lse: Floats2
    q: Floats3
    span: Ints2
    scale: Float
    queries: Ints1  # the numbers of those that are taken
    counts: Longs1  # of these queries, of splits of the one that sees the most keys; of tasks
    k_heads: Int  # key heads
    most_tasks: Int  # to which heads are shared out
    parts: Floats3  # of query j and split i: (H, DV sums, m, Σ, the scores) at j · splits + i


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


class DecodePacked(Decode):
    """Keys and values of any types, a row of bytes for all heads."""

    k: Bytes2
    v: Bytes2
    unpack_k: Int  # address of the code that unpacks the type's blocks
    unpack_v: Int
    k_blocks: Int  # of a row
    v_blocks: Int
    k_chunk: Floats4  # of each thread: (CHUNK, HK, D)
    v_chunk: Floats4  # (CHUNK, HK, DV)


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
def _score_keys(part, at, q, k, first, n, after, heads):
    """part[h, at + j] = q[h]·k[first + j] for n keys; q (H, D). Heads are taken by twos, or one.

    after: address of what is read after them; heads: the first, and the one past the last
    """
    d = q.shape[1]
    repeats = q.shape[0] // k.shape[1]
    row, q_row = 4 * part.shape[1], 4 * d
    to, of = part.ctypes.data, q.ctypes.data
    for j in range(0, n, KEYS):
        last = n - 1 - j
        for h in range(heads[0], heads[1], 2 - repeats % 2):
            keys = Keys(first + j, h // repeats, last, after)
            scores, queries = (
                HeadRows(to + h * row + 4 * (at + j), row),
                HeadRows(of + h * q_row, q_row),
            )
            if repeats % 2:
                score_tile(1, k, keys, scores, queries)
            else:
                score_tile(2, k, keys, scores, queries)
    for h in range(heads[0], heads[1] if d % LANES else 0):
        _add_scores(part, at, q, k, first, n, h, h // repeats)


@kernel
def _sum_values(part, at, v, first, n, dv, heads):
    """part[h, :dv] += Σ_j part[h, at + j] · v[first + j] for n keys."""
    repeats = part.shape[0] // v.shape[1]
    row, to, after = 4 * part.shape[1], part.ctypes.data, v[first].ctypes.data
    for j in range(0, n, KEYS):
        last = n - 1 - j
        for h in range(heads[0], heads[1], 2 - repeats % 2):
            keys = Keys(first + j, h // repeats, last, after)
            sums, weights = HeadRows(to + h * row, row), HeadRows(to + h * row + 4 * (at + j), row)
            if repeats % 2:
                value_tile(1, v, keys, sums, weights)
            else:
                value_tile(2, v, keys, sums, weights)
    for h in range(heads[0], heads[1] if dv % LANES else 0):
        _add_values(part, at, dv, v, first, n, h, h // repeats)


@kernel
def _weigh(part, dv, n, scale):
    """The scores of n keys become weights; their maxima and sums, and sums of values that are 0.

    Scores are taken in whole vectors: a split has room for them.
    """
    at, whole = dv + _SCORES, rounded_up(n, ROW_LANES)
    for h in range(part.shape[0]):
        scores = part[h, at:].ctypes.data
        top = row_top(scores, whole, 0, n, scale)
        part[h, dv + _TOP], part[h, dv + _NORM] = top, row_weights(scores, whole, n, scale, top)
        fill(part[h, :dv], np.float32(0))


@kernel
def _one_split(part, q, k, v, first, n, dv, scale, heads):
    """part (H, …) for the keys first … first + n, and some heads."""
    _score_keys(part, dv + _SCORES, q, k, first, n, v[first].ctypes.data, heads)
    _weigh(part[heads[0] : heads[1]], dv, n, scale)
    _sum_values(part, dv + _SCORES, v, first, n, dv, heads)


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


@kernel
def _join_head(f, j, h):
    """One head of one query, from its splits."""
    t = f.queries[j]
    n_seen = max(f.span[t, 1] - f.span[t, 0], 0)
    n_keys = _keys_of(n_seen)
    n_parts, first = (n_seen + n_keys - 1) // n_keys, j * f.counts[_SPLITS_OF_ONE]
    if n_parts > 0:
        f.lse[h, t] = _join(f.o[t, h], f.parts[first : first + n_parts], h)
    else:
        fill(f.o[t, h], np.float32(0))
        f.lse[h, t] = NO_KEYS


@task_code(Decode)
def _count_task(f, task, thread):
    """How many tasks there are: only for keys that some query sees. In a half-filled cache, one
    thread would get all tasks without keys."""
    n, most, n_key_heads = f.counts[_QUERIES], 0, f.k_heads
    for j in range(n):
        n_seen = max(f.span[f.queries[j], 1] - f.span[f.queries[j], 0], 0)
        n_keys = _keys_of(n_seen)
        most = max(most, (n_seen + n_keys - 1) // n_keys)
    of_task = max(1, n_key_heads * n * most // f.most_tasks)  # key heads
    n_groups = (n_key_heads + of_task - 1) // of_task
    f.counts[_SPLITS_OF_ONE] = most
    f.counts[_SPLIT_TASKS] = n * most * n_groups
    f.counts[_JOIN_TASKS] = 0 if most == 1 else n * f.o.shape[1]


@kernel
def _split_of(f, task):
    """(the query's place, its part, the first key, how many; the heads from and to which) of a
    task; no key if the query sees fewer. Neighbouring tasks are of different queries, so that every
    thread gets some with many keys."""
    n, most = f.counts[_QUERIES], f.counts[_SPLITS_OF_ONE]
    n_groups = f.counts[_SPLIT_TASKS] // (n * most)
    j, i, group = task % n, task // n % most, task // (n * most)
    t, n_heads = f.queries[j], f.o.shape[1]
    start, stop = f.span[t, 0], f.span[t, 1]
    n_keys = _keys_of(stop - start)
    first = start + i * n_keys
    of_task = (f.k_heads + n_groups - 1) // n_groups * (n_heads // f.k_heads)
    heads = min(group * of_task, n_heads), min((group + 1) * of_task, n_heads)
    return j, j * most + i, first, min(n_keys, stop - first), heads


@kernel
def _join_one(f, j, heads):
    """The heads of a task, if no other task has a split of a query's keys."""
    for h in range(heads[0], heads[1] if f.counts[_SPLITS_OF_ONE] == 1 else 0):
        _join_head(f, j, h)


def _split_task(f, task, thread):
    """One split of one query's keys."""
    j, part, first, n, heads = _split_of(f, task)
    if n > 0:
        q, dv = f.q[f.queries[j]], f.o.shape[2]
        _one_split(f.parts[part], q, f.k, f.v, first, n, dv, f.scale, heads)
    _join_one(f, j, heads)


@kernel
def _unpack(chunk, rows, first, n, code, n_blocks):
    for j in range(n):
        call_block(code, chunk[j].ctypes.data, rows[first + j].ctypes.data, n_blocks)


@task_code(DecodePacked)
def _packed_task(f, task, thread):
    """As _split_task, its keys and values unpacked chunk by chunk."""
    j, i, first, n, heads = _split_of(f, task)
    part, q, dv = f.parts[i], f.q[f.queries[j]], f.o.shape[2]
    k, v, at = f.k_chunk[thread], f.v_chunk[thread], dv + _SCORES
    for c in range(0, n, _CHUNK):
        own = min(_CHUNK, n - c)
        _unpack(k, f.k, first + c, own, f.unpack_k, f.k_blocks)
        _score_keys(part, at + c, q, k, 0, own, k.ctypes.data, heads)
    if n > 0:
        _weigh(part, dv, n, f.scale)
    for c in range(0, n, _CHUNK):
        own = min(_CHUNK, n - c)
        _unpack(v, f.v, first + c, own, f.unpack_v, f.v_blocks)
        _sum_values(part, at + c, v, 0, own, dv, heads)
    _join_one(f, j, heads)


_SPLITS = {
    kind: (task_code(frame)(_split_task), frame)
    for kind, frame in ((F32, DecodeF32), (F16, DecodeF16), (Q8_0, DecodeQ8))
}


@task_code(Decode)
def _join_task(f, task, thread):
    """One head of one query."""
    _join_head(f, task // f.o.shape[1], task % f.o.shape[1])


# -- binding ------------------------------------------------------------------------------------


def _takes(p: AttentionProblem) -> bool:
    return not p.has_extras and p.n_queries < MR


def _reads(p: AttentionProblem) -> bool:
    """Whether keys and values are read as they lie."""
    return p.key_type is p.value_type and p.key_type in _SPLITS


def _layout(p: AttentionProblem) -> Layout:
    n = p.value_size + _SCORES + _split_keys(p.n_seen)
    n_splits = min(_MOST_SPLITS, -(-p.n_seen // _FEWEST_KEYS))
    parts = Array((p.n_queries * n_splits, p.n_heads, round_up(n, _LINE)))
    if _reads(p):
        return Layout(parts=parts)
    k, v = (per_thread(_CHUNK, p.n_key_heads, size) for size in (p.head_size, p.value_size))
    return Layout(parts=parts, k_chunk=k, v_chunk=v)


def _bind(p: AttentionProblem, a: Forward, scratch: Scratch) -> Call:
    every = np.arange(p.n_queries, dtype=np.int32), np.array([p.n_queries, 0, 0, 0])
    return Call(launch, *_of_some(p, a, scratch, SomeQueries(*every)))


def _of_some(
    p: AttentionProblem, a: Forward, scratch: Scratch, queries: SomeQueries
) -> tuple[TaskStage, ...]:
    common: dict[str, Any] = dict(o=a.o, lse=a.lse, q=a.q, span=a.span, **scratch)
    common |= {"queries": queries.numbers, "counts": queries.counts, "scale": float(a.scale)}
    common |= {"k_heads": p.n_key_heads, "most_tasks": _TASKS * n_cores() if _reads(p) else 1}
    f: Decode
    if _reads(p):
        code, frame = _SPLITS[p.key_type]
        f = frame(k=as_bits(a.k), v=as_bits(a.v), **common)
    else:
        code, of_row = _packed_task, p.n_key_heads
        f = DecodePacked(
            k=as_bytes(a.k), unpack_k=UNPACK[p.key_type.name].address,
            k_blocks=of_row * p.head_size // p.key_type.block,
            v=as_bytes(a.v), unpack_v=UNPACK[p.value_type.name].address,
            v_blocks=of_row * p.value_size // p.value_type.block, **common,
        )  # fmt: skip
    splits, joins = queries.counts[_SPLIT_TASKS:_JOIN_TASKS], queries.counts[_JOIN_TASKS:]
    return stage(_count_task, f, 1), stage(code, f, splits), stage(_join_task, f, joins)


FORWARD: AttentionPath[Forward] = AttentionPath("decode", True, _takes, _layout, _bind, _of_some)
