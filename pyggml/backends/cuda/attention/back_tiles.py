"""The kernels of attention's backward pass on tensor cores, and their products, by four warps
together (group_ptx.py) or by each warp.

dq        a block for 64 queries of a head, over the keys that they see
dk, dv    a block for 64 keys of a key head, over the queries that see them
"""

from functools import cache, partial
from typing import Any

import numpy as np

from pyggml.backends.cuda.attention.fragments import (
    ALIGNED,
    BR,
    LOG2_E,
    THREADS,
    add_product,
    clear,
    held_at,
    hold,
    readers,
    seen_by_rows,
    sums_adder,
    tile_copier,
)
from pyggml.backends.cuda.attention.scores import ZERO, keys_of_query
from pyggml.backends.cuda.code import group_ptx, ptx
from pyggml.backends.cuda.code.fours import load_four, storer
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.early import follow, follower

BC = 64  # keys of a block that makes dk and dv


def step_of(in_groups: bool) -> int:
    """Rows of the other side that a block takes at a time."""
    return 64 if in_groups else 32


@cache
def _products_of_groups(head_size: int) -> tuple[Any, Any]:
    """(two_by_row, scores) as `_products` has them; A and A' lie first in the tile."""
    at_too = 2 * BR * head_size
    by_rows = group_ptx.by_rows(step_of(in_groups=True), head_size, 2)

    @device
    def two_by_row(s, held, dp, held_too, tile, right, right_too):
        by_rows((s, dp), tile, (0, at_too), (right, right_too))

    @device
    def scores(s, dp, tile, at_values, right, right_too):
        by_rows((s, dp), tile, (0, at_values), (right, right_too))

    return two_by_row, scores


@cache
def _products(head_size: int) -> tuple[Any, Any]:
    """(two_by_row, scores): s = A·Bᵀ and dp = A'·B'ᵀ in turns, so that sums which wait for nothing
    of each other follow each other. Of the first, A and A' are in registers; of the second K and V,
    of which a warp has 16 rows, and B and B' are queries and their gradients."""
    (left, right, _), n = readers(head_size), step_of(in_groups=False)

    @device
    def add_both(s, dp, a, a_too, tile, at, at_too, c):
        for j in range(n // 16):
            b, b_too = right(tile, at, 16 * j, c), right(tile, at_too, 16 * j, c)
            add_product(s, 2 * j, a, b[0], b[1])
            add_product(s, 2 * j + 1, a, b[2], b[3])
            add_product(dp, 2 * j, a_too, b_too[0], b_too[1])
            add_product(dp, 2 * j + 1, a_too, b_too[2], b_too[3])

    @device
    def two_by_row(s, held, dp, held_too, tile, at, at_too):
        clear(s, n // 8)
        clear(dp, n // 8)
        for c in range(head_size // 16):
            add_both(s, dp, held_at(held, c), held_at(held_too, c), tile, at, at_too, c)

    @device
    def scores(s, dp, tile, at_values, at_queries, at_gradients):
        clear(s, n // 8)
        clear(dp, n // 8)
        row = 16 * (cuda.threadIdx.x >> 5)
        for c in range(head_size // 16):
            a, a_too = left(tile, 0, row, c), left(tile, at_values, row, c)
            add_both(s, dp, a, a_too, tile, at_queries, at_gradients, c)

    return two_by_row, scores


def products_by(head_size: int, in_groups: bool) -> tuple[Any, ...]:
    """(two_by_row, scores, add_rows), and what waits for their factors."""
    two, source = (_products_of_groups, group_ptx) if in_groups else (_products, ptx)
    add_rows = sums_adder(head_size, step_of(in_groups), in_groups)
    return *two(head_size), add_rows, source.await_copies


@device
def write_rows(out, sums, row, n_rows, head, n_heads, head_size, put, first):
    """The lane's numbers of rows `row` and `row` + 8, of a matrix that begins at row `first`."""
    for r in range(2):
        if row + 8 * r < n_rows:
            at = (np.int64(first + row + 8 * r) * n_heads + head) * head_size
            at += (cuda.threadIdx.x & 3) << 1
            for i in range(head_size // 8):
                put(out, at + 8 * i, sums[i, 2 * r], sums[i, 2 * r + 1])


# -- dq --------------------------------------------------------------------------------------------


@device
def _slopes_by_query(s, dp, lse, delta, starts, stops, key, n_keys, scale):
    """dp becomes ds = p·(dp − δ)·scale; rows are queries, lse in powers of two."""
    column = key + ((cuda.threadIdx.x & 3) << 1)
    for i in range(n_keys // 8):
        for e in range(4):
            j, r = np.int32(column + 8 * i + (e & 1)), e >> 1
            p = ptx.power_of_two(s[i, e] * (scale * LOG2_E) - lse[r])
            is_seen = starts[r] <= j and j < stops[r]
            dp[i, e] = p * (dp[i, e] - delta[r]) * scale if is_seen else ZERO


@cache
def _holder(head_size: int) -> Any:
    left = readers(head_size)[0]

    @device
    def hold_both(held, held_too, tile, at):
        """The warp's rows of both first factors, when they have come."""
        row = 16 * (cuda.threadIdx.x >> 5)
        ptx.await_copies()
        cuda.syncthreads()
        for c in range(head_size // 16):
            hold(held, c, left(tile, 0, row, c))
            hold(held_too, c, left(tile, at, row, c))
        cuda.syncthreads()

    return hold_both


def bytes_by_query(head_size: int, in_groups: bool) -> int:
    """Shared memory of a block that makes dq: queries and their gradients, and two places for keys
    and values, which take that of the queries if warps hold these by themselves."""
    return (12 if in_groups else 4) * BR * head_size


@cache
def queries_kernel(head_size: int, dq_in_bf16: bool, in_groups: bool) -> Any:
    put, n = ptx.put_two(dq_in_bf16), step_of(in_groups)
    n_bytes = bytes_by_query(head_size, in_groups)
    copy_queries, copy_keys = (tile_copier(rows, head_size, in_groups) for rows in (BR, n))
    two_by_row, _, add_rows, await_copies = products_by(head_size, in_groups)
    hold_both, at_values, half = _holder(head_size), 2 * n * head_size, 2 * BR * head_size
    at_keys = 2 * half if in_groups else 0
    of_results, of_scores, of_query = (head_size // 8, 4), (n // 8, 4), (head_size // 16, 4)

    @partial(kernel, most_threads=THREADS, shared_bytes=n_bytes, least_blocks=2)
    def backward(
        dq, order, span, q, k, v, do, pairs, n_queries, n_padded, n_keys, n_heads, n_key_heads,
        scale,
    ):  # fmt: skip
        tile = cuda.shared.array(0, np.uint8, ALIGNED)
        s, dp = cuda.local.array(of_scores, np.float32), cuda.local.array(of_scores, np.float32)
        sums = cuda.local.array(of_results, np.float32)
        held = cuda.local.array(of_query, np.uint32)
        held_do = cuda.local.array(of_query, np.uint32)
        top, slope = cuda.local.array(2, np.float32), cuda.local.array(2, np.float32)
        starts, stops = cuda.local.array(2, np.int32), cuda.local.array(2, np.int32)
        follow()
        head, first = cuda.blockIdx.x, order[cuda.blockIdx.y] * BR
        key_head = head // (n_heads // n_key_heads)
        query = first + 16 * (cuda.threadIdx.x >> 5) + ((cuda.threadIdx.x & 31) >> 2)
        copy_queries(tile, 0, q, first, head, n_queries, n_heads)
        copy_queries(tile, half, do, first, head, n_queries, n_heads)
        ptx.commit_copies()
        for r in range(2):
            top[r], slope[r], starts[r], stops[r] = ZERO, ZERO, 0, 0
            if query + 8 * r < n_queries:
                starts[r], stops[r] = keys_of_query(span, query + 8 * r, n_keys)
                at = 2 * (np.int64(head) * n_padded + query + 8 * r)
                top[r], slope[r] = pairs[at], pairs[at + 1]
        start, stop = seen_by_rows(span, first, min(BR, n_queries - first), n_keys)
        clear(sums, head_size // 8)
        if not in_groups:
            hold_both(held, held_do, tile, half)
        copy_keys(tile, at_keys, k, start, key_head, n_keys, n_key_heads)
        copy_keys(tile, at_keys + at_values, v, start, key_head, n_keys, n_key_heads)
        ptx.commit_copies()
        here = at_keys
        for key in range(start, stop, n):
            there = 2 * at_keys + 2 * at_values - here
            await_copies()
            cuda.syncthreads()  # so all have read what was there
            copy_keys(tile, there, k, key + n, key_head, n_keys, n_key_heads)
            copy_keys(tile, there + at_values, v, key + n, key_head, n_keys, n_key_heads)
            ptx.commit_copies()
            two_by_row(s, held, dp, held_do, tile, here, here + at_values)
            _slopes_by_query(s, dp, top, slope, starts, stops, key, n, scale)
            add_rows(sums, dp, tile, here)
            here = there
        ptx.await_copies()
        write_rows(dq, sums, query, n_queries, head, n_heads, head_size, put, 0)

    return follower(backward)


# -- dk and dv -------------------------------------------------------------------------------------
# Where blocks share a key head's queries, another kernel adds up their parts.


@device
def _copy_records(tile, at, pairs, spans, head, query, n_padded, n):
    """Starts the copies of what is known of n queries, a power of two: 16 bytes of a thread."""
    half = n // 2
    if cuda.threadIdx.x < n and query < n_padded:
        i, to = cuda.threadIdx.x & (half - 1), at + 16 * cuda.threadIdx.x
        if cuda.threadIdx.x < half:
            ptx.copy_16(tile, to, pairs, 8 * (head * n_padded + query) + 16 * i, np.int32(16))
        else:
            ptx.copy_16(tile, to, spans, 8 * query + 16 * i, np.int32(16))


@device
def _slopes_by_key(s, dp, tile, at, key, n, scale):
    """s becomes p, dp becomes ds; rows are the lane's keys `key` and `key` + 8. The records of the
    n queries, which are columns, begin at byte `at`."""
    for i in range(n // 8):
        of_column = at + 8 * (8 * i + ((cuda.threadIdx.x & 3) << 1))
        f = ptx.load_words(tile, of_column)
        seen_by = ptx.load_words(tile, of_column + 8 * n)
        for e in range(4):
            one = e & 1
            row = np.int32(key + 8 * (e >> 1))
            power, delta = ptx.as_float(f[2] if one else f[0]), ptx.as_float(f[3] if one else f[1])
            start, stop = (seen_by[2], seen_by[3]) if one else (seen_by[0], seen_by[1])
            p = ptx.power_of_two(s[i, e] * (scale * LOG2_E) - power)
            is_seen = np.int32(start) <= row and row < np.int32(stop)
            s[i, e] = p if is_seen else ZERO
            dp[i, e] = p * (dp[i, e] - delta) * scale if is_seen else ZERO


def bytes_by_key(head_size: int, in_groups: bool) -> int:
    """Shared memory of a block that makes dk and dv: keys and values, two places for queries, their
    gradients, and their records."""
    return 4 * BC * head_size + 2 * step_of(in_groups) * (4 * head_size + 16)


@cache
def keys_kernel(head_size: int, dk_in_bf16: bool, dv_in_bf16: bool, in_groups: bool) -> Any:
    put_dk, put_dv, n = ptx.put_two(dk_in_bf16), ptx.put_two(dv_in_bf16), step_of(in_groups)
    copy_keys, copy_queries = (tile_copier(rows, head_size, in_groups) for rows in (BC, n))
    _, scores, add_rows, await_copies = products_by(head_size, in_groups)
    n_bytes = bytes_by_key(head_size, in_groups)
    at_v, at_q, one = 2 * BC * head_size, 4 * BC * head_size, 2 * n * head_size
    at_records = at_q + 4 * one  # behind both places of queries and of their gradients
    of_results, of_scores = (head_size // 8, 4), (n // 8, 4)

    @partial(kernel, most_threads=THREADS, shared_bytes=n_bytes, least_blocks=2)
    def backward(
        dk, dv, order, n_heads_of_part, range_of, spans, q, k, v, do, pairs, n_queries, n_padded,
        n_keys, n_heads, n_key_heads, scale,
    ):  # fmt: skip
        tile = cuda.shared.array(0, np.uint8, ALIGNED)
        s, dp = cuda.local.array(of_scores, np.float32), cuda.local.array(of_scores, np.float32)
        dks = cuda.local.array(of_results, np.float32)
        dvs = cuda.local.array(of_results, np.float32)
        follow()
        key_head, group = cuda.blockIdx.x, order[cuda.blockIdx.z]
        first = group * BC
        key = first + 16 * (cuda.threadIdx.x >> 5) + ((cuda.threadIdx.x & 31) >> 2)
        head = key_head * (n_heads // n_key_heads) + cuda.blockIdx.y * n_heads_of_part
        past = head + n_heads_of_part
        copy_keys(tile, 0, k, first, key_head, n_keys, n_key_heads)
        copy_keys(tile, at_v, v, first, key_head, n_keys, n_key_heads)
        clear(dks, head_size // 8)
        clear(dvs, head_size // 8)
        start, stop = range_of[2 * group], range_of[2 * group + 1]
        query, here = start, 0  # the first of two places, or the second
        copy_queries(tile, at_q, q, start, head, n_queries, n_heads)
        copy_queries(tile, at_q + one, do, start, head, n_queries, n_heads)
        _copy_records(tile, at_records, pairs, spans, head, start, n_padded, n)
        ptx.commit_copies()
        for _ in range(n_heads_of_part * -(-(stop - start) // n) if start < stop else 0):
            query += n
            if query >= stop:
                query, head = start, head + 1
            await_copies()
            cuda.syncthreads()  # so all have read what was there
            if head < past:
                there = at_q + 2 * one * (1 - here)
                copy_queries(tile, there, q, query, head, n_queries, n_heads)
                copy_queries(tile, there + one, do, query, head, n_queries, n_heads)
                there = at_records + 16 * n * (1 - here)
                _copy_records(tile, there, pairs, spans, head, query, n_padded, n)
                ptx.commit_copies()
            at = at_q + 2 * one * here
            scores(s, dp, tile, at_v, at, at + one)
            _slopes_by_key(s, dp, tile, at_records + 16 * n * here, key, n, scale)
            add_rows(dvs, s, tile, at + one)
            add_rows(dks, dp, tile, at)
            here = 1 - here
        ptx.await_copies()
        part = cuda.blockIdx.y * n_keys
        write_rows(dk, dks, key, n_keys, key_head, n_key_heads, head_size, put_dk, part)
        write_rows(dv, dvs, key, n_keys, key_head, n_key_heads, head_size, put_dv, part)

    return follower(backward)


@cache
def adder_of(dk_in_bf16: bool, dv_in_bf16: bool) -> Any:
    put_dk, put_dv = storer(dk_in_bf16), storer(dv_in_bf16)

    @device
    def sums_of_four(parts, i, n, n_parts):
        a, b, c, d = load_four(parts, i)
        for part in range(1, n_parts):
            more = load_four(parts, part * n + i)
            a, b, c, d = a + more[0], b + more[1], c + more[2], d + more[3]
        return a, b, c, d

    @kernel
    def add_parts(dk, dv, of_dk, of_dv, n, n_parts):
        """dk, dv (n,) = Σ of their parts (n_parts, n), four numbers at a time."""
        follow()
        for i in range(4 * cuda.grid(1), n, 4 * cuda.gridsize(1)):
            four = sums_of_four(of_dk, i, n, n_parts)
            put_dk(dk, i, four[0], four[1], four[2], four[3])
            four = sums_of_four(of_dv, i, n, n_parts)
            put_dv(dv, i, four[0], four[1], four[2], four[3])

    return follower(add_parts)
