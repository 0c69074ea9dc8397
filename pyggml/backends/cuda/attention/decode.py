"""Attention of few queries over many keys, as in generation: blocks share the keys of a head.

A block takes some of the keys that a query sees, for some of the heads that share them; each of its
warps takes a few keys at a time (keys.py), and the next few are on their way meanwhile. The blocks
of a query join their sums in a cluster or through the card's memory (joins.py). The heads of one
token may be made in the kernel (one_token.py).
"""

from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.attention.joins import MOST_PARTS, joiners
from pyggml.backends.cuda.attention.keys import fours_of, keys_of, query_reader
from pyggml.backends.cuda.attention.one_token import Token, of_token
from pyggml.backends.cuda.attention.scores import (
    MINUS_INF,
    ZERO,
    base_of,
    bias_of,
    cap_score,
    keys_of_query,
    raw_numbers,
    scores_of,
)
from pyggml.backends.cuda.attention.spread import Spread
from pyggml.backends.cuda.code.cluster_ptx import MOST_BLOCKS, has_clusters
from pyggml.backends.cuda.code.formulas import short_exp
from pyggml.backends.cuda.code.fours import vectorizable
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.ptx import as_float, bits_of_all
from pyggml.backends.cuda.code.warp import LANES
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.early import (
    await_others,
    begins_early,
    follow,
    least_shared,
    release_others,
)
from pyggml.backends.cuda.runtime.kernel import Compute, CudaSite
from pyggml.backends.cuda.runtime.launches import launch
from pyggml.backends.cuda.runtime.simulator import small
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import Tensor

MOST_QUERIES = small(32)
_WARPS = small(8)
_BLOCKS = 264  # that are wanted: two for each multiprocessor of a large card
_MOST_OF_CLUSTERS = 4096  # keys: for many more, the 16 parts that there are without are faster
_TOGETHER, _NUMBERS = 4, 1024  # heads of a block, and numbers of them, at most


class _Shape(NamedTuple):
    """What a kernel is compiled for: the size of a head, the type of keys, heads of a block, blocks
    of heads that share their keys, whether scores have a bias, whether they have a cap, whether all
    lie in fours, whether the heads of the token are made here, the blocks of a query if they are a
    cluster, else 0, the keys that a warp reads at once, whether others are released when those
    before have ended."""

    head_size: int
    key_type: str
    n_together: int
    blocks: int
    has_bias: bool
    has_cap: bool
    vectorized: bool
    makes_heads: bool
    of_cluster: int
    batch: int
    releases_first: bool

    @property
    def mine(self) -> int:
        """Numbers of a head that a lane has."""
        return 4 * fours_of(self.head_size)


def takes(node: Tensor, compute: Compute) -> bool:
    """Whether it is the path for this attention."""
    k, v = node.src[1:3]
    return node.shape[0] <= MOST_QUERIES and k.shape == v.shape and k.dtype is v.dtype


def _heads(node: Tensor) -> int:
    """Heads of a block: of those that share their keys."""
    sharing = node.shape[1] // node.src[1].shape[1]
    most = min(sharing, _TOGETHER, max(1, _NUMBERS // node.shape[2]))
    return next(n for n in range(most, 0, -1) if sharing % n == 0)


def _batch(node: Tensor) -> int:
    """Keys that a warp reads at once: a power of two. Of one query twice as many, if a block has
    few large heads: its registers hold them, and it waits for memory half as often."""
    n_queries, _, head_size = node.shape
    most = max(1, 16 * LANES // max(head_size, 2 * LANES))
    has_room = n_queries == 1 and head_size > 2 * LANES and _heads(node) <= 2
    return small(1 << (most << has_room).bit_length() - 1)


def _in_clusters(node: Tensor) -> bool:
    """Whether the blocks of a query are a cluster: there are fewer then, so not for many keys."""
    return has_clusters() and node.src[1].shape[0] <= _MOST_OF_CLUSTERS


def _n_parts(node: Tensor) -> int:
    n_queries, n_heads, head_size = node.shape
    n_free = max(1, _BLOCKS // (n_queries * (n_heads // _heads(node))))
    if _in_clusters(node):  # which are compiled for a number of blocks: few numbers will do
        most = min(n_free, MOST_BLOCKS, head_size)
        return 1 << most.bit_length() - 1
    most = -(-node.src[1].shape[0] // (_WARPS * _batch(node)))
    return max(1, min(n_free, most, MOST_PARTS))


def scratch(node: Tensor, compute: Compute) -> int:
    """Of each query, head and part: the sum of its values, then its maximum and its weight."""
    if _in_clusters(node):
        return 0
    n_queries, n_heads, head_size = node.shape
    return F32.block_bytes * n_queries * n_heads * _n_parts(node) * (head_size + 2)


def _spread(shape: _Shape) -> Spread:
    """Of the scores of a batch of keys for all heads of a block, and room for further heads."""
    n_heads = 1 << (shape.n_together - 1).bit_length()
    return Spread(n_heads * shape.batch, shape.batch)


def _scorer(shape: _Shape) -> Any:
    spread, mine, batch = _spread(shape), shape.mine, shape.batch
    n_own, number, sums = spread.n_own, spread.number, spread.sums
    n_scores, n_all = shape.n_together * batch, spread.n

    @device
    def score(x, held, keys, head, query, key, last, mask, sizes, factors):
        """The scores of a batch of keys for all heads of the block, spread over the warp."""
        for g in range(shape.n_together):
            for u in range(batch):
                dot = ZERO
                for i in range(mine):
                    dot += held[g * mine + i] * keys[u * mine + i]
                x[g * batch + u] = dot
        for j in range(n_scores, n_all):
            x[j] = ZERO
        sums(x)
        for i in range(n_own):
            j = number(i)
            this = np.int32(key + (j & batch - 1))
            logit = cap_score(x[i], factors) if shape.has_cap else x[i] * factors.scale
            if shape.has_bias and this < last and j < n_scores:
                logit += bias_of(head + j // batch, query, this, last, mask, sizes, factors)
            x[i] = logit if this < last else MINUS_INF

    return score


def _carrier(shape: _Shape) -> Any:
    spread, mine, batch = _spread(shape), shape.mine, shape.batch
    n_own, greatest, of = spread.n_own, spread.greatest, spread.of

    @device
    def carry(o, tops, weights, x, values):
        """Maximum, weight and sum of each head move on by the scores of a batch. A lane has the
        maximum of its number's head, and of the weight the part of its number."""
        p, shrinks = cuda.local.array(n_own, np.float32), cuda.local.array(n_own, np.float32)
        for i in range(n_own):
            highest = max(tops[i], greatest(x, i))
            base = base_of(highest)
            shrinks[i], p[i] = short_exp(tops[i] - base), short_exp(x[i] - base)
            tops[i], weights[i] = highest, weights[i] * shrinks[i] + p[i]
        for g in range(shape.n_together):
            shrink = of(shrinks, g * batch) if shape.n_together > 1 else shrinks[0]
            for i in range(mine):
                o[g * mine + i] *= shrink
            for u in range(batch):
                share = of(p, g * batch + u)
                for i in range(mine):
                    o[g * mine + i] += share * values[u * mine + i]

    return carry


def _sums_putter(shape: _Shape) -> Any:
    spread, mine, batch = _spread(shape), shape.mine, shape.batch
    is_whole = shape.head_size % (4 * LANES) == 0
    n_own, number, total = spread.n_own, spread.number, spread.total

    @device
    def put_sums(sums, ends, o, tops, weights, warp, lane):
        """A warp's sums of each head, its maximum and its weight."""
        for g in range(shape.n_together):
            for i in range(mine):
                c = 4 * (lane + i // 4 * LANES) + i % 4
                if is_whole or c < shape.head_size:
                    sums[warp, g, np.uint32(c)] = o[g * mine + i]
        for i in range(n_own):
            weight, head = total(weights, i), np.uint32(number(i) // batch)
            if head < shape.n_together:
                ends[warp, head, 0], ends[warp, head, 1] = tops[i], weight

    return put_sums


@device
def _nothing():
    pass


@cache
def _attend(shape: _Shape) -> Any:
    head_size, n_together, batch = shape.head_size, shape.n_together, shape.batch
    mine, sharing, makes_heads = shape.mine, shape.blocks, shape.makes_heads
    (n_raw, raw_type), fetch, unpack = keys_of(shape.key_type, head_size, batch, shape.vectorized)
    read_query, of_raw = query_reader(head_size, shape.vectorized), batch * mine // 4 * n_raw
    read_token, make_heads, keep_token, replace = of_token(shape.key_type, n_together, batch)
    score, carry, put_sums = _scorer(shape), _carrier(shape), _sums_putter(shape)
    place, begin, finish = joiners(n_together, head_size, _WARPS, shape.of_cluster)
    of_ends, of_sums = (_WARPS, n_together, 2), (_WARPS, n_together, head_size)
    spread, of_heads, of_cluster = _spread(shape), n_together * mine, shape.of_cluster
    wait, release = (follow, _nothing) if shape.releases_first else (await_others, release_others)
    of_keys, of_scores, of_own, of_tops = batch * mine, spread.n, 2 * mine, spread.n_own

    @partial(kernel, shared_bytes=least_shared())
    def attend(out, lse, partials, tickets, q, k, v, span, mask, sinks, sizes, factors, token):
        place()
        barrier = cuda.shared.array(1, np.uint64)
        begin(barrier)
        ends, sums = cuda.shared.array(of_ends, np.float32), cuda.shared.array(of_sums, np.float32)
        held, o = cuda.local.array(of_heads, np.float32), cuda.local.array(of_heads, np.float32)
        keys, values = cuda.local.array(of_keys, np.float32), cuda.local.array(of_keys, np.float32)
        raw_k, raw_v = cuda.local.array(of_raw, raw_type), cuda.local.array(of_raw, raw_type)
        z, own = cuda.local.array(of_scores, np.float32), cuda.local.array(of_own, np.float32)
        tops, weights = cuda.local.array(of_tops, np.float32), cuda.local.array(of_tops, np.float32)
        part, query, n_parts = cuda.blockIdx.x, cuda.blockIdx.z, of_cluster or cuda.gridDim.x
        lane, warp = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        head, key_head = cuda.blockIdx.y * n_together, cuda.blockIdx.y // sharing
        row = np.int64(query) * sizes.n_heads + head
        start, stop = keys_of_query(span, query, sizes.n_keys)
        last = np.int32(stop)
        key = np.int32(start + np.int32((part * _WARPS + warp) * batch))
        fetch(raw_k, raw_v, k, v, key, last, key_head, sizes, lane)
        sums[warp, 0, 0] = as_float(bits_of_all((out, lse, q, sinks, sizes, factors, token)))
        wait()
        for i in range(of_tops):
            tops[i], weights[i] = MINUS_INF, ZERO
        for g in range(n_together):
            read_query(held, g * mine, q, (row + g) * head_size, lane)
            for i in range(mine):
                o[g * mine + i] = ZERO
        if makes_heads:
            new_row, turns = read_token(own, token, key_head)
            make_heads(held, own, token, turns)
        while key < last:
            unpack(keys, values, raw_k, raw_v)
            this, key = key, np.int32(key + n_parts * (_WARPS * batch))
            fetch(raw_k, raw_v, k, v, key, last, key_head, sizes, lane)
            if makes_heads:
                replace(keys, values, own, new_row, this, last)
            score(z, held, keys, head, query, this, last, mask, sizes, factors)
            carry(o, tops, weights, z, values)
        release()
        put_sums(sums, ends, o, tops, weights, warp, lane)
        cuda.syncthreads()
        finish(barrier, out, lse, partials, tickets, sinks, sums, ends, query, head, sizes)
        if makes_heads:
            is_first = part == 0 and warp == _WARPS - 1 and cuda.blockIdx.y % sharing == 0
            keep_token(own, token, new_row, key_head, is_first)

    return begins_early(attend, lambda arguments: arguments[5:8])  # keys, values and their span


def bind(site: CudaSite, token: Token | None = None, releases_first: bool = False) -> Call:
    """The launch. token: of the only query, whose heads are not made yet, nor in the cache;
    releases_first: as _Shape has it."""
    node = site.node
    q, k, v, span, *_ = site.src
    q = q if token is None else token.q
    (sizes, factors, mask, sinks), n_together = scores_of(site, 4, q), _heads(node)
    n_queries, n_heads, head_size = node.shape
    vectorized = head_size % 4 == 0 and vectorizable(q, k, v)
    n_groups, partials, tickets = n_heads // n_together, q, q  # clusters need neither
    if not _in_clusters(node):
        partials = site.scratch.view(np.float32)
        tickets = site.constant(np.zeros(n_queries * n_groups, np.uint32))  # 0 between launches
    has_bias, blocks = sizes.steep_heads > 0, n_groups // sizes.n_key_heads
    of_cluster = _n_parts(node) if _in_clusters(node) else 0
    shape = _Shape(
        head_size, node.src[1].dtype.name, n_together, blocks, has_bias, node.params["cap"] > 0,
        vectorized, token is not None, of_cluster, _batch(node),
        releases_first,
    )  # fmt: skip
    return launch(
        _attend(shape), (_n_parts(node), n_groups, n_queries), _WARPS * LANES, site.stream,
        site.out, site.saved[0], partials, tickets, q, *raw_numbers(site, 1, 2), span, mask, sinks,
        sizes, factors, 0 if token is None else token, shared_bytes=least_shared(),
    )  # fmt: skip
