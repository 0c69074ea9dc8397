"""dk and dv: a block for 64 keys of a key head, over the queries that see them. Where blocks share
a key head's queries, another kernel adds up their parts."""

from functools import cache, partial
from typing import Any

import numpy as np

from pyggml.backends.cuda.attention.back_products import BC, products_by, step_of, write_rows
from pyggml.backends.cuda.attention.fragments import ALIGNED, LOG2_E, THREADS, clear, tile_copier
from pyggml.backends.cuda.attention.scores import ZERO
from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.fours import load_four, storer
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.early import follow, follower


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
