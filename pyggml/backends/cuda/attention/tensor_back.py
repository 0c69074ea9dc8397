"""Attention backward on tensor cores: q, k, v and do rounded to bfloat16 or given so, sums in
float32.

One kernel makes dq, a block for 64 queries of a head; another dk and dv, a block for 64 keys of a
key head. Both make the scores again, so that each number is summed by one warp in a fixed order.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda import ptx
from pyggml.backends.cuda.attention.fragments import (
    LOG2_E,
    THREADS,
    add_product,
    as_left,
    clear,
    keep,
    kept,
    put_two,
    readers,
    seen_by_rows,
    tile_copier,
)
from pyggml.backends.cuda.attention.scores import ZERO, seen
from pyggml.backends.cuda.attention.tensor import in_bf16, scratch_in_bf16
from pyggml.backends.cuda.blocks import block_max
from pyggml.backends.cuda.driver import cuda, device, kernel
from pyggml.backends.cuda.fours import loader
from pyggml.backends.cuda.kernel import Site
from pyggml.backends.cuda.launch import THREADS as MOST_THREADS
from pyggml.backends.cuda.launch import in_turn, launch, per_row
from pyggml.backends.cuda.warp import LANES, warp_sum
from pyggml.call import Call
from pyggml.dtypes import BF16, F32, I32
from pyggml.sizes import round_up
from pyggml.tensors import Tensor

ROWS = 64  # queries, or keys, of a block
KEYS = 32  # at a time, where a block has queries
QUERIES = 16  # at a time, where a block has keys
_WARPS = 8
_LINE = 64
_ROUNDED = (0, 1, 2, 6)  # q, k, v, do


@cache
def _deltas(o_in_bf16: bool, do_in_bf16: bool) -> Any:
    load_o, load_do = loader(o_in_bf16), loader(do_in_bf16)

    @kernel
    def deltas(delta, o, do, n_queries, n_heads, head_size):
        """delta (H, T) = do·o, a warp for each."""
        lane, warp = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        for e in range(cuda.blockIdx.x * _WARPS + warp, delta.size, cuda.gridDim.x * _WARPS):
            query, head = e // n_heads, e % n_heads
            total = ZERO
            for c in range(4 * lane, head_size, 4 * LANES):
                p = load_o(o, np.int64(e) * head_size + c)
                q = load_do(do, np.int64(e) * head_size + c)
                total += p[0] * q[0] + p[1] * q[1] + p[2] * q[2] + p[3] * q[3]
            total = warp_sum(total)
            if lane == 0:
                delta[head * n_queries + query] = total

    return deltas


@cache
def _products(head_size: int) -> tuple[Any, Any]:
    """(by_row, across_rows): s = A·Bᵀ of a tile's rows with A in registers; sums += p·B."""
    _, right, across = readers(head_size)
    steps = head_size // 16

    @device
    def by_row(s, held, tile, at, n):
        clear(s, n // 8)
        for c in range(steps):
            a = kept(held, c)
            for j in range(n // 16):
                b = right(tile, at, 16 * j, c)
                add_product(s, 2 * j, a, b[0], b[1])
                add_product(s, 2 * j + 1, a, b[2], b[3])

    @device
    def across_rows(sums, p, tile, at, n):
        for j in range(n // 16):
            a = as_left(p, j)
            for c in range(steps):
                b = across(tile, at, 16 * j, c)
                add_product(sums, 2 * c, a, b[0], b[1])
                add_product(sums, 2 * c + 1, a, b[2], b[3])

    return by_row, across_rows


@device
def _write(out, sums, row, n_rows, head, n_heads, head_size, put):
    """The lane's numbers of rows `row` and `row` + 8."""
    for r in range(2):
        if row + 8 * r < n_rows:
            at = (np.int64(row + 8 * r) * n_heads + head) * head_size
            at += (cuda.threadIdx.x & 3) << 1
            for i in range(head_size // 8):
                put(out, at + 8 * i, sums[i, 2 * r], sums[i, 2 * r + 1])


@device
def _slopes_by_query(s, dp, lse, delta, starts, stops, key, scale):
    """dp becomes ds = p·(dp − δ)·scale; rows are queries, lse in powers of two."""
    column = key + ((cuda.threadIdx.x & 3) << 1)
    for i in range(KEYS // 8):
        for e in range(4):
            j, r = column + 8 * i + (e & 1), e >> 1
            p = ptx.power_of_two(s[i, e] * (scale * LOG2_E) - lse[r])
            is_seen = starts[r] <= j and j < stops[r]
            dp[i, e] = p * (dp[i, e] - delta[r]) * scale if is_seen else ZERO


@cache
def _queries_kernel(head_size: int, dq_in_bf16: bool) -> Any:
    put = put_two(dq_in_bf16)
    copy_rows, copy_keys = tile_copier(ROWS, head_size), tile_copier(KEYS, head_size)
    left = readers(head_size)[0]
    by_row, across_rows = _products(head_size)
    half = ROWS * head_size * 2  # also k and v of KEYS keys
    at_values, n_bytes = half // 2, 2 * half
    of_results, of_scores, of_query = (head_size // 8, 4), (KEYS // 8, 4), (head_size // 16, 4)

    @kernel
    def backward(dq, q, k, v, do, span, lse, delta, n_queries, n_keys, n_heads, n_key_heads, scale):
        tile = cuda.shared.array(n_bytes, np.uint8, 128)
        s = cuda.local.array(of_scores, np.float32)
        dp = cuda.local.array(of_scores, np.float32)
        sums = cuda.local.array(of_results, np.float32)
        held = cuda.local.array(of_query, np.uint32)
        held_do = cuda.local.array(of_query, np.uint32)
        top, slope = cuda.local.array(2, np.float32), cuda.local.array(2, np.float32)
        starts, stops = cuda.local.array(2, np.int64), cuda.local.array(2, np.int64)
        warp, first, head = cuda.threadIdx.x >> 5, cuda.blockIdx.x * ROWS, cuda.blockIdx.y
        key_head = head // (n_heads // n_key_heads)
        query = first + 16 * warp + ((cuda.threadIdx.x & 31) >> 2)
        copy_rows(tile, 0, q, first, head, n_queries, n_heads)
        copy_rows(tile, half, do, first, head, n_queries, n_heads)
        ptx.commit_copies()
        for r in range(2):
            top[r], slope[r], starts[r], stops[r] = ZERO, ZERO, 0, 0
            if query + 8 * r < n_queries:
                starts[r], stops[r] = seen(span, query + 8 * r, n_keys)
                at = np.int64(head) * n_queries + query + 8 * r
                top[r], slope[r] = lse[at] * LOG2_E, delta[at]
        start, stop = seen_by_rows(span, first, min(ROWS, n_queries - first), n_keys)
        clear(sums, head_size // 8)
        ptx.await_copies()
        cuda.syncthreads()
        for c in range(head_size // 16):
            keep(held, c, left(tile, 0, 16 * warp, c))
            keep(held_do, c, left(tile, half, 16 * warp, c))
        cuda.syncthreads()
        copy_keys(tile, 0, k, start, key_head, n_keys, n_key_heads)
        copy_keys(tile, at_values, v, start, key_head, n_keys, n_key_heads)
        ptx.commit_copies()
        here = 0
        for key in range(start, stop, KEYS):
            copy_keys(tile, half - here, k, key + KEYS, key_head, n_keys, n_key_heads)
            copy_keys(tile, half - here + at_values, v, key + KEYS, key_head, n_keys, n_key_heads)
            ptx.commit_copies()
            ptx.await_all_but_one()
            cuda.syncthreads()
            by_row(s, held, tile, here, KEYS)
            by_row(dp, held_do, tile, here + at_values, KEYS)
            _slopes_by_query(s, dp, top, slope, starts, stops, key, scale)
            across_rows(sums, dp, tile, here, KEYS)
            cuda.syncthreads()
            here = half - here
        ptx.await_copies()
        _write(dq, sums, query, n_queries, head, n_heads, head_size, put)

    return backward


@kernel
def _find_queries(range_of, span, n_queries, n_keys):
    """range_of (groups of keys, 2): the first query that sees any of ROWS keys, and the one past
    the last. A block takes a group."""
    parts = cuda.shared.array(MOST_THREADS, np.int32)
    for group in range(cuda.blockIdx.x, range_of.size // 2, cuda.gridDim.x):
        first, before, past = group * ROWS, np.int32(-n_queries), np.int32(0)
        for query in range(cuda.threadIdx.x, n_queries, cuda.blockDim.x):
            start, stop = seen(span, query, n_keys)
            if start < stop and start < first + ROWS and stop > first:
                before, past = max(before, np.int32(-query)), np.int32(query + 1)
        before, past = block_max(before, parts), block_max(past, parts)
        if cuda.threadIdx.x == 0:
            range_of[2 * group], range_of[2 * group + 1] = -before, past


@device
def _load_queries(floats, seen_by, lse, delta, span, query, n_queries, n_keys, head):
    """Of the lane's columns: (lse in powers of two, δ), and the keys that each query sees."""
    column = query + ((cuda.threadIdx.x & 3) << 1)
    for i in range(QUERIES // 8):
        for half in range(2):
            j, to = column + 8 * i + half, 2 * i + half
            last = min(j, n_queries - 1)
            start, stop = seen(span, last, n_keys)
            seen_by[to, 0], seen_by[to, 1] = start, stop if j < n_queries else start
            at = np.int64(head) * n_queries + last
            floats[to, 0], floats[to, 1] = lse[at] * LOG2_E, delta[at]


@device
def _slopes_by_key(s, dp, floats, seen_by, key, scale):
    """s becomes p, dp becomes ds; rows are the lane's keys `key` and `key` + 8."""
    for i in range(QUERIES // 8):
        for e in range(4):
            of, row = 2 * i + (e & 1), key + 8 * (e >> 1)
            is_seen = seen_by[of, 0] <= row and row < seen_by[of, 1]
            p = ptx.power_of_two(s[i, e] * (scale * LOG2_E) - floats[of, 0]) if is_seen else ZERO
            s[i, e] = p
            dp[i, e] = p * (dp[i, e] - floats[of, 1]) * scale


@cache
def _key_products(head_size: int) -> Any:
    left, right, _ = readers(head_size)

    @device
    def scores(s, tile, at_rows, at_columns):
        """s = A·Bᵀ: the warp's 16 rows of one tile, and 16 rows of another."""
        clear(s, QUERIES // 8)
        row = 16 * (cuda.threadIdx.x >> 5)
        for c in range(head_size // 16):
            a, b = left(tile, at_rows, row, c), right(tile, at_columns, 0, c)
            add_product(s, 0, a, b[0], b[1])
            add_product(s, 1, a, b[2], b[3])

    return scores


@cache
def _keys_kernel(head_size: int, dk_in_bf16: bool, dv_in_bf16: bool) -> Any:
    put_dk, put_dv = put_two(dk_in_bf16), put_two(dv_in_bf16)
    copy_keys, copy_queries = tile_copier(ROWS, head_size), tile_copier(QUERIES, head_size)
    scores, across_rows = _key_products(head_size), _products(head_size)[1]
    at_v, at_q, n_bytes = 2 * ROWS * head_size, 4 * ROWS * head_size, 6 * ROWS * head_size
    one = 2 * QUERIES * head_size  # bytes of a tile of queries
    of_results, of_scores = (head_size // 8, 4), (QUERIES // 8, 4)
    of_queries = (QUERIES // 4, 2)

    @kernel
    def backward(
        dk, dv, range_of, q, k, v, do, span, lse, delta, n_queries, n_keys, n_heads, n_key_heads,
        scale,
    ):  # fmt: skip
        tile = cuda.shared.array(n_bytes, np.uint8, 128)
        s = cuda.local.array(of_scores, np.float32)
        dp = cuda.local.array(of_scores, np.float32)
        dks = cuda.local.array(of_results, np.float32)
        dvs = cuda.local.array(of_results, np.float32)
        floats = cuda.local.array(of_queries, np.float32)
        seen_by = cuda.local.array(of_queries, np.int32)
        first, key_head = cuda.blockIdx.x * ROWS, cuda.blockIdx.y
        key = first + 16 * (cuda.threadIdx.x >> 5) + ((cuda.threadIdx.x & 31) >> 2)
        repeats = n_heads // n_key_heads
        copy_keys(tile, 0, k, first, key_head, n_keys, n_key_heads)
        copy_keys(tile, at_v, v, first, key_head, n_keys, n_key_heads)
        ptx.commit_copies()
        clear(dks, head_size // 8)
        clear(dvs, head_size // 8)
        start, stop = range_of[2 * cuda.blockIdx.x], range_of[2 * cuda.blockIdx.x + 1]
        here = at_q
        for head in range(key_head * repeats, key_head * repeats + repeats):
            copy_queries(tile, here, q, start, head, n_queries, n_heads)
            copy_queries(tile, here + one, do, start, head, n_queries, n_heads)
            ptx.commit_copies()
            for query in range(start, stop, QUERIES):
                there = 2 * at_q + 2 * one - here  # of two places, the other
                copy_queries(tile, there, q, query + QUERIES, head, n_queries, n_heads)
                copy_queries(tile, there + one, do, query + QUERIES, head, n_queries, n_heads)
                ptx.commit_copies()
                _load_queries(floats, seen_by, lse, delta, span, query, n_queries, n_keys, head)
                ptx.await_all_but_one()
                cuda.syncthreads()
                scores(s, tile, 0, here)
                scores(dp, tile, at_v, here + one)
                _slopes_by_key(s, dp, floats, seen_by, key, scale)
                across_rows(dvs, s, tile, here + one, QUERIES)
                across_rows(dks, dp, tile, here, QUERIES)
                cuda.syncthreads()
                here = there
            ptx.await_copies()
            cuda.syncthreads()
        _write(dk, dks, key, n_keys, key_head, n_key_heads, head_size, put_dk)
        _write(dv, dvs, key, n_keys, key_head, n_key_heads, head_size, put_dv)

    return backward


def scratch(node: Tensor) -> int:
    """The sources that are rounded, δ (H, T), and the queries of each block of keys."""
    return scratch_in_bf16(node, *_ROUNDED) + sum(_parts(node))


def _parts(node: Tensor) -> tuple[int, int]:
    delta = F32.block_bytes * node.shape[0] * node.shape[1]
    return round_up(delta, _LINE), 2 * I32.block_bytes * -(-node.src[1].shape[0] // ROWS)


def _in_bf16(*tensors: Tensor) -> tuple[bool, ...]:
    return tuple(t.dtype is BF16 for t in tensors)


def bind(site: Site) -> Call:
    node = site.node
    (n_queries, n_heads, head_size), (n_keys, n_key_heads, _) = node.shape, node.src[1].shape
    arrays, calls, rest = in_bf16(site, *_ROUNDED)
    delta = rest[: F32.block_bytes * n_queries * n_heads].view(np.float32)
    at, n_bytes = _parts(node)
    range_of = rest[at : at + n_bytes].view(np.int32)
    span, o, lse, do = site.src[3:7]
    of_delta = (delta, o, do, n_queries, n_heads, head_size)
    deltas = _deltas(*_in_bf16(node.src[4], node.src[6]))
    sizes = n_queries, n_keys, n_heads, n_key_heads
    common = (*arrays, span, lse, delta, *sizes, np.float32(node.params["scale"]))
    by_query, by_key = (-(-n_queries // ROWS), n_heads), (-(-n_keys // ROWS), n_key_heads)
    of_queries = _queries_kernel(head_size, *_in_bf16(node))
    of_keys = _keys_kernel(head_size, *_in_bf16(*node.saved[:2]))
    stream = site.stream
    return in_turn(
        per_row(_find_queries, by_key[0], n_queries, stream, range_of, span, n_queries, n_keys),
        *calls,
        launch(deltas, min(-(-delta.size // _WARPS), 4096), _WARPS * LANES, stream, *of_delta),
        launch(of_queries, by_query, THREADS, stream, site.out, *common, writes=[site.out]),
        launch(
            of_keys,
            by_key,
            THREADS,
            stream,
            *site.saved[:2],
            range_of,
            *common,
            writes=site.saved[:2],
        ),
    )
