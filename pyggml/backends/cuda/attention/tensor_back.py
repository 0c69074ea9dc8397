"""Attention backward on tensor cores: q, k, v and do rounded to bfloat16 or given so, sums in
float32.

dq        a block for 64 queries of a head, over the keys that they see
dk, dv    a block for 64 keys of a key head, over the queries that see them

Both make the scores again, so that each number is summed by one warp in a fixed order. Where blocks
of keys would be too few, each takes some of the heads that share the keys, and a third kernel adds
up their parts. Where a block's four warps can multiply together (group_ptx.py) they do, with 64 of
the other side at a time, else each by itself with 32.
"""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np

from pyggml.backends.cuda.attention.fragments import (
    ALIGNED,
    BR,
    THREADS,
    clear,
    rows_holder,
    rows_multiplier,
    seen_by_rows,
    sums_adder,
    tile_copier,
    write_rows,
)
from pyggml.backends.cuda.attention.scores import ZERO, keys_of_queries, keys_of_query
from pyggml.backends.cuda.attention.tensor import in_bf16, scratch_in_bf16
from pyggml.backends.cuda.code import group_ptx, ptx
from pyggml.backends.cuda.code.blocks import block_max
from pyggml.backends.cuda.code.formulas import LOG2_E
from pyggml.backends.cuda.code.fours import eights, storer, sum_of_fours
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.warp import ALL
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.early import follow, follower
from pyggml.backends.cuda.runtime.kernel import ALIGNMENT, Compute, CudaSite
from pyggml.backends.cuda.runtime.launches import THREADS as MOST_THREADS
from pyggml.backends.cuda.runtime.launches import in_turn, launch, per_element, per_row
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16
from pyggml.graph.tensor import Tensor
from pyggml.sizes import round_up

BC = 64  # keys of a block that makes dk and dv
_WARPS = 8  # of a block that makes records
_BLOCKS = 264  # that are wanted: two for each multiprocessor of a large card
_ROUNDED = (0, 1, 2, 6)  # q, k, v, do


# -- what is known before ------------------------------------------------------------------------


@cache
def _records(head_size: int, o_in_bf16: bool, do_in_bf16: bool) -> Any:
    load_o, load_do, lanes = eights(o_in_bf16), eights(do_in_bf16), head_size // 8

    @kernel
    def records(pairs, spans, o, do, lse, span, n_queries, n_padded, n_keys, n_heads):
        """What the keys' kernel needs of each query, without bounds to check.

        pairs (H, P, 2): lse in powers of two and δ = do·o; spans (P, 2): the keys that a query
        sees. P is n_queries, rounded up: what is added sees nothing. A warp takes a query and as
        many heads as its lanes have eight numbers for.
        """
        lane, query = cuda.threadIdx.x & 31, cuda.blockIdx.x * _WARPS + (cuda.threadIdx.x >> 5)
        head, total = cuda.blockIdx.y * (32 // lanes) + lane // lanes, ZERO
        follow()
        is_query = query < n_queries and head < n_heads
        if is_query:
            at = (np.int64(query) * n_heads + head) * head_size + 8 * (lane & (lanes - 1))
            p, q = load_o(o, at), load_do(do, at)
            total = (p[0] * q[0] + p[1] * q[1] + p[2] * q[2] + p[3] * q[3]) + (
                p[4] * q[4] + p[5] * q[5] + p[6] * q[6] + p[7] * q[7]
            )
        for step in (8, 4, 2, 1):
            if step < lanes:
                total += cuda.shfl_xor_sync(ALL, total, step)
        if lane & (lanes - 1) == 0 and query < n_padded and head < n_heads:
            power, start, stop = ZERO, np.int32(0), np.int32(0)
            if is_query:
                power = lse[np.int64(head) * n_queries + query] * LOG2_E
                one, other = keys_of_query(span, query, n_keys)
                start, stop = np.int32(one), np.int32(other)
            at = 2 * (np.int64(head) * n_padded + query)
            pairs[at], pairs[at + 1] = power, total
            if head == 0:
                spans[2 * query], spans[2 * query + 1] = start, stop

    return follower(records)


def _blocks_of_records(node: Tensor) -> tuple[int, int]:
    _, n_heads, head_size = node.shape
    return -(-_padded_rows(node) // _WARPS), -(-n_heads // (256 // head_size))


@kernel
def _find_queries(range_of, span, n_queries, n_keys, step):
    """range_of (groups of BC, 2): the first query that sees any key of a group, rounded
    down to a multiple of `step`, and the one past the last. A block takes a group."""
    parts = cuda.shared.array(MOST_THREADS, np.int32)
    for group in range(cuda.blockIdx.x, range_of.size // 2, cuda.gridDim.x):
        first, before, past = group * BC, np.int32(-n_queries), np.int32(0)
        for query in range(cuda.threadIdx.x, n_queries, cuda.blockDim.x):
            start, stop = keys_of_query(span, query, n_keys)
            if start < stop and start < first + BC and stop > first:
                before, past = max(before, np.int32(-query)), np.int32(query + 1)
        before, past = block_max(before, parts), block_max(past, parts)
        if cuda.threadIdx.x == 0:
            range_of[2 * group], range_of[2 * group + 1] = -before // step * step, past


@kernel
def _find_order(orders, lengths, range_of, span, n_queries, n_keys):
    """orders: groups of BC keys, then those of BR queries, each with the longest first; a block for
    each kind. lengths: as many numbers"""
    n_key_groups, n = range_of.size // 2, range_of.size // 2
    start, has_keys = 0, cuda.blockIdx.x == 0
    if not has_keys:
        n, start = orders.size - n_key_groups, n_key_groups
    for i in range(cuda.threadIdx.x, n, cuda.blockDim.x):
        one, other = range_of[2 * i % range_of.size], range_of[(2 * i + 1) % range_of.size]
        if not has_keys:
            first = i * BR
            one, other = keys_of_queries(span, first, min(BR, n_queries - first), n_keys)
        lengths[start + i] = other - one
    cuda.syncthreads()
    for i in range(cuda.threadIdx.x, n, cuda.blockDim.x):
        place, mine = 0, lengths[start + i]
        for j in range(n):
            length = lengths[start + j]
            place += length > mine or (length == mine and j < i)
        orders[start + place] = i


def _step(in_groups: bool) -> int:
    """Rows of the other side that a block takes at a time."""
    return 64 if in_groups else 32


def _source(in_groups: bool) -> Any:
    """What waits for factors."""
    return group_ptx if in_groups else ptx


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


def _bytes_by_query(head_size: int, in_groups: bool) -> int:
    """Shared memory of a block that makes dq: queries and their gradients, and two places for keys
    and values, which take that of the queries if warps hold these by themselves."""
    return (12 if in_groups else 4) * BR * head_size


@cache
def _queries_kernel(head_size: int, dq_in_bf16: bool, in_groups: bool) -> Any:
    put, n = ptx.put_two(dq_in_bf16), _step(in_groups)
    n_bytes = _bytes_by_query(head_size, in_groups)
    copy_queries, copy_keys = (tile_copier(rows, head_size, in_groups) for rows in (BR, n))
    two_by_row = rows_multiplier(head_size, n, in_groups, 2, is_held=True)
    add_rows, await_copies = sums_adder(head_size, n, in_groups), _source(in_groups).await_copies
    hold, at_values, half = rows_holder(head_size, 2), 2 * n * head_size, 2 * BR * head_size
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
            hold((held, held_do), tile)
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
            two_by_row((s, dp), (held, held_do), tile, (here, here + at_values))
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


def _bytes_by_key(head_size: int, in_groups: bool) -> int:
    """Shared memory of a block that makes dk and dv: keys and values, two places for queries, their
    gradients, and their records."""
    return 4 * BC * head_size + 2 * _step(in_groups) * (4 * head_size + 16)


@cache
def _keys_kernel(head_size: int, dk_in_bf16: bool, dv_in_bf16: bool, in_groups: bool) -> Any:
    put_dk, put_dv, n = ptx.put_two(dk_in_bf16), ptx.put_two(dv_in_bf16), _step(in_groups)
    copy_keys, copy_queries = (tile_copier(rows, head_size, in_groups) for rows in (BC, n))
    scores = rows_multiplier(head_size, n, in_groups, 2, is_held=False)
    add_rows, await_copies = sums_adder(head_size, n, in_groups), _source(in_groups).await_copies
    n_bytes = _bytes_by_key(head_size, in_groups)
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
            scores((s, dp), (0, 0), tile, (at, at + one))
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
def _adder(dk_in_bf16: bool, dv_in_bf16: bool) -> Any:
    put_dk, put_dv = storer(dk_in_bf16), storer(dv_in_bf16)

    @kernel
    def add_parts(dk, dv, of_dk, of_dv, n, n_parts):
        """dk, dv (4n,) = Σ of their parts (n_parts, 4n), four numbers at a time."""
        follow()
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            four = sum_of_fours(of_dk, i, n, n_parts)
            put_dk(dk, 4 * i, four[0], four[1], four[2], four[3])
            four = sum_of_fours(of_dv, i, n, n_parts)
            put_dv(dv, 4 * i, four[0], four[1], four[2], four[3])

    return follower(add_parts)


# -- launches -------------------------------------------------------------------------------------


def _n_parts(node: Tensor) -> int:
    """Blocks of each group of keys, which divide the heads that share them."""
    n_keys, n_key_heads, _ = node.src[1].shape
    repeats = node.shape[1] // n_key_heads
    n_free = _BLOCKS // (-(-n_keys // BC) * n_key_heads)
    return next(n for n in range(max(1, min(n_free, repeats)), 0, -1) if repeats % n == 0)


def scratch(node: Tensor, compute: Compute) -> int:
    """The sources that are rounded, what is known of queries and of groups of keys, and parts."""
    return scratch_in_bf16(node, *_ROUNDED) + sum(_pieces(node))


def _padded_rows(node: Tensor) -> int:
    return round_up(node.shape[0], _step(in_groups=True))


def _n_groups(node: Tensor) -> tuple[int, int]:
    """Of keys, and of queries."""
    return -(-node.src[1].shape[0] // BC), -(-node.shape[0] // BR)


def _pieces(node: Tensor) -> tuple[int, ...]:
    """Bytes of pairs (H, P, 2), spans (P, 2), the queries of each group of keys (…, 2), the parts
    of dk and of dv, and the order of groups with their lengths."""
    n_queries, n_heads, n_groups = _padded_rows(node), node.shape[1], _n_groups(node)
    records = (2 * 4 * n for n in (n_heads * n_queries, n_queries, n_groups[0]))
    n_parts, order = _n_parts(node), 4 * sum(n_groups)
    part = 4 * n_parts * node.src[1].n_elements if n_parts > 1 else 0
    return tuple(round_up(n, ALIGNMENT) for n in (*records, part, part, order, order))


def _causal_order(n_keys: int, n_queries: int) -> np.ndarray:
    """The order of groups of keys, and of queries, where all run at once: two that share a
    multiprocessor, one of each half, have as much to do as any two under a causal mask."""
    halves = [
        [*range(n - 1, n // 2 - 1, -1), *range(n // 2)] for n in (n_keys, n_queries)
    ]  # fmt: skip
    return np.array([n_keys - 1 - i for i in halves[0]] + halves[1], np.int32)


def _in_bf16(*tensors: Tensor) -> tuple[bool, ...]:
    return tuple(t.dtype is BF16 for t in tensors)


def _orders(site: CudaSite, range_of: Any, scratch: Sequence[Any]) -> tuple[Any, list[Call]]:
    """The order in which blocks take groups of keys, then of queries; and the calls that find it,
    where they do not all run at once."""
    node, n_groups = site.node, _n_groups(site.node)
    if n_groups[0] * node.src[1].shape[1] <= _BLOCKS:
        return site.constant(_causal_order(*n_groups)), []
    orders, lengths = (piece[: sum(n_groups)] for piece in scratch)
    return orders, [
        per_row(
            _find_order, 2, max(n_groups), site.stream, orders, lengths, range_of, site.src[3],
            node.shape[0], node.src[1].shape[0],
        )
    ]  # fmt: skip


def _cut(node: Tensor, scratch: Any) -> Iterator[Any]:
    """The arrays of `_pieces`."""
    kinds = np.float32, np.int32, np.int32, np.float32, np.float32, np.int32, np.int32
    ends = np.cumsum([0, *_pieces(node)])
    return (scratch[a:b].view(kind) for (a, b), kind in zip(pairwise(ends), kinds, strict=True))


def bind(site: CudaSite) -> Call:
    node, stream = site.node, site.stream
    (n_queries, n_heads, head_size), (n_keys, n_key_heads, _) = node.shape, node.src[1].shape
    arrays, calls, rest = in_bf16(site, *_ROUNDED)
    pairs, spans, range_of, *parts, order, lengths = _cut(node, rest)
    span, o, lse, do = site.src[3:7]
    sizes = n_queries, _padded_rows(node), n_keys, n_heads, n_key_heads
    common = (*arrays, pairs, *sizes, np.float32(node.params["scale"]))
    n_parts, n_groups = _n_parts(node), _n_groups(node)
    by_query, by_key = (n_heads, n_groups[1]), (n_key_heads, n_parts, n_groups[0])
    in_groups, of_results = group_ptx.groups_multiply(), _in_bf16(*node.saved[:2])
    range_of, step = range_of[: 2 * n_groups[0]], _step(in_groups)
    orders, finds = _orders(site, range_of, (order, lengths))
    records = _records(head_size, *_in_bf16(node.src[4], node.src[6]))
    of_queries = _queries_kernel(head_size, *_in_bf16(node), in_groups)
    of_keys = _keys_kernel(head_size, *(of_results if n_parts == 1 else (False, False)), in_groups)
    results, n = site.saved[:2], np.uint32(node.src[1].n_elements // 4)
    sums = results if n_parts == 1 else parts
    add = per_element(_adder(*of_results), int(n), stream, *results, *parts, n, n_parts)
    of_part = n_heads // n_key_heads // n_parts
    return in_turn(
        per_row(
            _find_queries, n_groups[0], n_queries, stream, range_of, span, n_queries, n_keys, step
        ),
        *finds,
        *calls,
        launch(
            records, _blocks_of_records(node), 32 * _WARPS, stream, pairs, spans, o, do, lse, span,
            *sizes[:4], writes=[pairs, spans],
        ),
        launch(
            of_queries, by_query, THREADS, stream, site.out, orders[n_groups[0] :], span, *common,
            shared_bytes=_bytes_by_query(head_size, in_groups), writes=[site.out],
        ),
        launch(
            of_keys, by_key, THREADS, stream, *sums, orders, of_part, range_of, spans, *common,
            shared_bytes=_bytes_by_key(head_size, in_groups), writes=sums,
        ),
        *([add] if n_parts > 1 else []),
    )  # fmt: skip
