"""Attention backward on tensor cores: q, k, v and do rounded to bfloat16 or given so, sums in
float32.

One kernel makes dq, another dk and dv (back_tiles.py). Both make the scores again, so that each
number is summed by one warp in a fixed order. Where blocks of keys would be too few, each takes
some of the heads that share the keys, and a third kernel adds up their parts. Where a block's four
warps can multiply together (group_ptx.py) they do, with 64 of the other side at a time, else each
by itself with 32.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from pyggml.backends.cuda.attention.back_tiles import (
    BC,
    adder_of,
    bytes_by_key,
    bytes_by_query,
    keys_kernel,
    queries_kernel,
    step_of,
)
from pyggml.backends.cuda.attention.fragments import BR, LOG2_E, THREADS
from pyggml.backends.cuda.attention.scores import ZERO, keys_of_queries, keys_of_query
from pyggml.backends.cuda.attention.tensor import in_bf16, scratch_in_bf16
from pyggml.backends.cuda.code import group_ptx
from pyggml.backends.cuda.code.blocks import block_max
from pyggml.backends.cuda.code.fours import eights
from pyggml.backends.cuda.code.jit import kernel
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

_WARPS = 8
_BLOCKS = 264  # that are wanted: two for each multiprocessor of a large card
_ROUNDED = (0, 1, 2, 6)  # q, k, v, do


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
    return round_up(node.shape[0], step_of(in_groups=True))


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
    range_of, step = range_of[: 2 * n_groups[0]], step_of(in_groups)
    orders, finds = _orders(site, range_of, (order, lengths))
    records = _records(head_size, *_in_bf16(node.src[4], node.src[6]))
    of_queries = queries_kernel(head_size, *_in_bf16(node), in_groups)
    of_keys = keys_kernel(head_size, *(of_results if n_parts == 1 else (False, False)), in_groups)
    results, n = site.saved[:2], node.src[1].n_elements
    sums = results if n_parts == 1 else parts
    add = per_element(adder_of(*of_results), n // 4, stream, *results, *parts, n, n_parts)
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
            shared_bytes=bytes_by_query(head_size, in_groups), writes=[site.out],
        ),
        launch(
            of_keys, by_key, THREADS, stream, *sums, orders, of_part, range_of, spans, *common,
            shared_bytes=bytes_by_key(head_size, in_groups), writes=sums,
        ),
        *([add] if n_parts > 1 else []),
    )  # fmt: skip
