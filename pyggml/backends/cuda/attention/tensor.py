"""Attention forward on tensor cores: q, k and v rounded to bfloat16 or given so, sums in float32.

A block takes 64 queries of a head, each of its four warps 16 of them. Their q stays in registers;
keys come 64 at a time, values while the scores are made, the next keys while values are added.
"""

import math
from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.attention.fragments import (
    ALIGNED,
    HEAD_SIZES,
    LN_2,
    LOG2_E,
    THREADS,
    add_product,
    as_left,
    clear,
    held_at,
    hold,
    put_two,
    readers,
    seen_by_rows,
    tile_copier,
)
from pyggml.backends.cuda.attention.scores import MINUS_INF, NO_KEYS, ZERO, keys_of_query
from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.warp import quad_max, quad_sum
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import ALIGNMENT, Compute, Site
from pyggml.backends.cuda.runtime.launches import in_turn, launch
from pyggml.backends.cuda.weights.unpack import round_to_bfloat16
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.tensor import Tensor
from pyggml.sizes import round_up

BR, KEYS = 64, 64  # queries of a block (B_r of Dao et al.), and keys at a time


def takes(node: Tensor, compute: Compute) -> bool:
    """Whether it computes this attention: products that may round, and scores without extras."""
    q, k, v = node.src[:3]
    p = node.params
    plain = not (p["masked"] or p["cap"] or p["max_bias"])
    n_extras = len(node.src) - (4 if len(node.saved) == 1 else 7)
    rounds = compute == "bf16" and ptx.TENSOR_CORES and {k.dtype, v.dtype} <= {F32, BF16}
    fits = k.shape == v.shape and q.shape[2] in HEAD_SIZES and q.shape[0] >= 16
    return rounds and plain and not n_extras and fits


@device
def _softmax(s, top, total, starts, stops, key, scale):
    """Scores become 2^(score − maximum); returns what sums so far shrink by, for both rows.

    top (2,), total (2,), starts (2,), stops (2,): of the lane's rows g and g + 8.
    """
    column = key + ((cuda.threadIdx.x & 3) << 1)
    first, second = top[0], top[1]
    for i in range(KEYS // 8):
        for e in range(4):
            j, r = np.int32(column + 8 * i + (e & 1)), e >> 1
            is_seen = starts[r] <= j and j < stops[r]
            s[i, e] = s[i, e] * scale if is_seen else MINUS_INF
        first = max(first, max(s[i, 0], s[i, 1]))
        second = max(second, max(s[i, 2], s[i, 3]))
    first, second = quad_max(first), quad_max(second)
    base, other = ZERO if first == MINUS_INF else first, ZERO if second == MINUS_INF else second
    shrink, shrink_other = ptx.power_of_two(top[0] - base), ptx.power_of_two(top[1] - other)
    here, there = ZERO, ZERO
    for i in range(KEYS // 8):
        s[i, 0] = ptx.power_of_two(s[i, 0] - base)
        s[i, 1] = ptx.power_of_two(s[i, 1] - base)
        s[i, 2] = ptx.power_of_two(s[i, 2] - other)
        s[i, 3] = ptx.power_of_two(s[i, 3] - other)
        here += s[i, 0] + s[i, 1]
        there += s[i, 2] + s[i, 3]
    top[0], top[1] = first, second
    total[0] = total[0] * shrink + here
    total[1] = total[1] * shrink_other + there
    return shrink, shrink_other


@cache
def _steps(head_size: int) -> tuple[Any, Any]:
    """(scores, values) of a tile of keys."""
    _, right, across = readers(head_size)
    steps = head_size // 16

    @device
    def scores(s, held, tile, at):
        """s = q·kᵀ."""
        clear(s, KEYS // 8)
        for c in range(steps):
            a = held_at(held, c)
            for j in range(KEYS // 16):
                b = right(tile, at, 16 * j, c)
                add_product(s, 2 * j, a, b[0], b[1])
                add_product(s, 2 * j + 1, a, b[2], b[3])

    @device
    def values(o, s, tile, at, shrink, other):
        """o = o · shrink + p·v."""
        for i in range(head_size // 8):
            o[i, 0] *= shrink
            o[i, 1] *= shrink
            o[i, 2] *= other
            o[i, 3] *= other
        for j in range(KEYS // 16):
            a = as_left(s, j)
            for c in range(steps):
                b = across(tile, at, 16 * j, c)
                add_product(o, 2 * c, a, b[0], b[1])
                add_product(o, 2 * c + 1, a, b[2], b[3])

    return scores, values


@device
def _write(out, lse, o, top, total, query, head, n_queries, n_heads, head_size, put):
    lane = cuda.threadIdx.x & 31
    for r in range(2):
        row, weight = query + 8 * r, quad_sum(total[r])
        share = np.float32(1) / weight if weight > ZERO else ZERO
        if row < n_queries:
            if lane & 3 == 0:
                log_sum = (top[r] + math.log2(weight)) * LN_2 if weight > ZERO else NO_KEYS
                lse[np.int64(head) * n_queries + row] = log_sum
            at = (np.int64(row) * n_heads + head) * head_size + ((lane & 3) << 1)
            for i in range(head_size // 8):
                put(out, at + 8 * i, o[i, 2 * r] * share, o[i, 2 * r + 1] * share)


@cache
def _kernel(head_size: int, out_in_bf16: bool) -> Any:
    put = put_two(out_in_bf16)
    copy_queries, copy_keys = tile_copier(BR, head_size), tile_copier(KEYS, head_size)
    left = readers(head_size)[0]
    scores, values = _steps(head_size)
    at_values = KEYS * head_size * 2
    n_bytes, results, steps = 2 * at_values, head_size // 8, head_size // 16
    of_scores, of_results, of_query = (KEYS // 8, 4), (results, 4), (steps, 4)

    @kernel
    def forward(out, lse, q, k, v, span, n_queries, n_keys, n_heads, n_key_heads, scale):
        tile = cuda.shared.array(n_bytes, np.uint8, ALIGNED)
        s = cuda.local.array(of_scores, np.float32)
        o = cuda.local.array(of_results, np.float32)
        held = cuda.local.array(of_query, np.uint32)
        top, total = cuda.local.array(2, np.float32), cuda.local.array(2, np.float32)
        starts, stops = cuda.local.array(2, np.int32), cuda.local.array(2, np.int32)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        first, head = cuda.blockIdx.x * BR, cuda.blockIdx.y
        key_head, query = head // (n_heads // n_key_heads), first + 16 * warp + (lane >> 2)
        copy_queries(tile, 0, q, first, head, n_queries, n_heads)
        ptx.commit_copies()
        for r in range(2):
            top[r], total[r], starts[r], stops[r] = MINUS_INF, ZERO, 0, 0
            if query + 8 * r < n_queries:
                starts[r], stops[r] = keys_of_query(span, query + 8 * r, n_keys)
        start, stop = seen_by_rows(span, first, min(BR, n_queries - first), n_keys)
        clear(o, results)
        ptx.await_copies()
        cuda.syncthreads()
        for c in range(steps):
            hold(held, c, left(tile, 0, 16 * warp, c))
        cuda.syncthreads()
        copy_keys(tile, 0, k, start, key_head, n_keys, n_key_heads)
        ptx.commit_copies()
        for key in range(start, stop, KEYS):
            copy_keys(tile, at_values, v, key, key_head, n_keys, n_key_heads)
            ptx.commit_copies()
            ptx.await_all_but_one()
            cuda.syncthreads()
            scores(s, held, tile, 0)
            cuda.syncthreads()
            copy_keys(tile, 0, k, key + KEYS, key_head, n_keys, n_key_heads)
            ptx.commit_copies()
            shrink, other = _softmax(s, top, total, starts, stops, key, scale)
            ptx.await_all_but_one()
            cuda.syncthreads()
            values(o, s, tile, at_values, shrink, other)
            cuda.syncthreads()
        ptx.await_copies()
        _write(out, lse, o, top, total, query, head, n_queries, n_heads, head_size, put)

    return forward


def in_bf16(site: Site, *which: int) -> tuple[list[Any], list[Call], Any]:
    """(the sources of these positions in bfloat16, the calls that round them, scratch left)."""
    arrays, calls, at = [], [], 0
    for i in which:
        if site.node.src[i].dtype is BF16:
            arrays.append(site.src[i])
            continue
        n = site.node.src[i].n_elements
        arrays.append(site.scratch[at : at + 2 * n].view(np.uint16))
        calls.append(round_to_bfloat16(arrays[-1], site.src[i], site.stream))
        at += round_up(2 * n, ALIGNMENT)
    return arrays, calls, site.scratch[at:]


def scratch_in_bf16(node: Tensor, *which: int) -> int:
    to_round = (t for t in (node.src[i] for i in which) if t.dtype is not BF16)
    return sum(round_up(2 * t.n_elements, ALIGNMENT) for t in to_round)


def scratch(node: Tensor, compute: Compute) -> int:
    return scratch_in_bf16(node, 0, 1, 2)


def bind(site: Site) -> Call:
    node = site.node
    (n_queries, n_heads, head_size), (n_keys, n_key_heads, _) = node.shape, node.src[1].shape
    arrays, calls, _ = in_bf16(site, 0, 1, 2)
    scale = np.float32(node.params["scale"]) * LOG2_E
    sizes = n_queries, n_keys, n_heads, n_key_heads
    arguments = (site.out, site.saved[0], *arrays, site.src[3], *sizes, scale)
    grid = -(-n_queries // BR), n_heads
    run = _kernel(head_size, node.dtype is BF16)
    return in_turn(*calls, launch(run, grid, THREADS, site.stream, *arguments))
