"""dq: a block for 64 queries of a head, over the keys that they see."""

from functools import cache, partial
from typing import Any

import numpy as np

from pyggml.backends.cuda.attention.back_products import BR, products_by, step_of, write_rows
from pyggml.backends.cuda.attention.fragments import (
    ALIGNED,
    LOG2_E,
    THREADS,
    clear,
    hold,
    readers,
    seen_by_rows,
    tile_copier,
)
from pyggml.backends.cuda.attention.scores import ZERO, keys_of_query
from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.early import follow, follower


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
