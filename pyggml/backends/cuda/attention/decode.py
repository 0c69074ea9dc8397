"""Attention of few queries over many keys, as in generation: blocks share the keys of a head.

A block takes a part of the keys that a query sees, for some of the heads that share them; each of
its warps takes a few keys at a time, and a lane holds every 32nd number of a head. The block of a
query that ends last joins the sums of all, in their order.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.attention.scores import (
    MINUS_INF,
    NO_KEYS,
    ONE,
    ZERO,
    bias_of,
    capped,
    factors_of,
    key_loader,
    seen,
    sizes_of,
)
from pyggml.backends.cuda.blocks import is_last
from pyggml.backends.cuda.driver import SIMULATED, cuda, device, kernel
from pyggml.backends.cuda.early import begins_early, waiting
from pyggml.backends.cuda.kernel import Site
from pyggml.backends.cuda.launch import launch
from pyggml.backends.cuda.warp import LANES, warp_max, warp_sum
from pyggml.call import Call
from pyggml.dtypes import F32
from pyggml.tensors import Tensor

MOST = 2 if SIMULATED else 8  # queries
_WARPS = 2 if SIMULATED else 4
_PARTS = 5 if SIMULATED else 16  # of a query's keys, at most
_BLOCKS = 264  # that are wanted: two for each multiprocessor of a large card
_TOGETHER = 4  # heads of a block, at most


def takes(node: Tensor) -> bool:
    """Whether it is the path for this attention."""
    return node.shape[0] <= MOST


def _heads(node: Tensor) -> int:
    """Heads of a block: of those that share their keys."""
    sharing = node.shape[1] // node.src[1].shape[1]
    return next(n for n in range(min(sharing, _TOGETHER), 0, -1) if sharing % n == 0)


def _batch(head_size: int) -> int:
    """Keys that a warp reads at once."""
    return 2 if SIMULATED else max(1, 16 * LANES // max(head_size, 2 * LANES))


def _n_parts(node: Tensor) -> int:
    n_queries, n_heads, head_size = node.shape
    wanted = _BLOCKS // (n_queries * (n_heads // _heads(node)))
    most = -(-node.src[1].shape[0] // (_WARPS * _batch(head_size)))
    return max(1, min(wanted, most, _PARTS))


def scratch(node: Tensor) -> int:
    """Of each query, head and part: the sum of its values, then its maximum and its weight."""
    n_queries, n_heads, head_size = node.shape
    return F32.block_bytes * n_queries * n_heads * _n_parts(node) * (head_size + 2)


@device
def _put_part(parts, at, sums, ends, g):
    """The sum, maximum and weight of a block's head g, of its warps'."""
    n_warps, _, head_size = sums.shape
    highest = MINUS_INF
    for w in range(n_warps):
        highest = max(highest, ends[w, g, 0])
    base = ZERO if highest == MINUS_INF else highest
    for c in range(cuda.threadIdx.x, head_size, cuda.blockDim.x):
        value = ZERO
        for w in range(n_warps):
            value += sums[w, g, c] * math.exp(ends[w, g, 0] - base)
        parts[at + c] = value
    if cuda.threadIdx.x == 0:
        weight = ZERO
        for w in range(n_warps):
            weight += ends[w, g, 1] * math.exp(ends[w, g, 0] - base)
        parts[at + head_size], parts[at + head_size + 1] = highest, weight


@device
def _share_out(shares, lse, parts, sinks, first, query, head, n_parts, head_size, sizes):
    """The share of each part in a head's result, by a warp. first: where the head's parts begin"""
    step, lane = head_size + 2, cuda.threadIdx.x % LANES
    sink = sinks[head] if sizes.has_sinks else MINUS_INF
    highest, weight = sink, ZERO
    for part in range(lane, n_parts, LANES):
        highest = max(highest, parts[first + part * step + head_size])
    highest = warp_max(highest)
    base = ZERO if highest == MINUS_INF else highest
    for part in range(lane, n_parts, LANES):
        at = first + part * step + head_size
        weight += parts[at + 1] * math.exp(parts[at] - base)
    weight = warp_sum(weight) + math.exp(sink - base)
    whole = ONE / weight if weight > ZERO else ZERO
    for part in range(lane, n_parts, LANES):
        shares[part] = math.exp(parts[first + part * step + head_size] - base) * whole
    if lane == 0:
        found = base + math.log(weight) if weight > ZERO else NO_KEYS
        lse[np.int64(head) * sizes.n_queries + query] = found


@device
def _sum_of_parts(parts, at, step, shares, n_parts):
    """A number of a head's result; four parts are read at once, for each read takes its time."""
    total = ZERO
    for part in range(0, n_parts - 3, 4):
        a, b = parts[at + part * step], parts[at + (part + 1) * step]
        c, d = parts[at + (part + 2) * step], parts[at + (part + 3) * step]
        total += a * shares[part] + b * shares[part + 1]
        total += c * shares[part + 2] + d * shares[part + 3]
    for part in range(n_parts // 4 * 4, n_parts):
        total += parts[at + part * step] * shares[part]
    return total


@device
def _join(out, lse, parts, sinks, shares, query, head, n_parts, head_size, sizes):
    """The results of a block's heads, from `head` on, of all their parts."""
    n_together, step = shares.shape[0], head_size + 2
    row = np.int64(query) * sizes.n_heads + head
    for g in range(cuda.threadIdx.x // LANES, n_together, _WARPS):
        first = (row + g) * n_parts * step
        _share_out(shares[g], lse, parts, sinks, first, query, head + g, n_parts, head_size, sizes)
    cuda.syncthreads()
    for i in range(cuda.threadIdx.x, n_together * head_size, cuda.blockDim.x):
        g, c = i // head_size, i % head_size
        at = (row + g) * n_parts * step + c
        out[row * head_size + i] = _sum_of_parts(parts, at, step, shares[g], n_parts)


def _reader(load: Any, head_size: int, mine: int, batch: int) -> Any:
    @device
    def read(into, x, key, last, key_head, n_key_heads, lane):
        """A lane's numbers of the next keys, or of their values; after the last one, its again."""
        for u in range(batch):
            at = (np.int64(min(key + u, last - 1)) * n_key_heads + key_head) * head_size
            for i in range(mine):
                c = lane + i * LANES
                into[u * mine + i] = load(x, at + c) if c < head_size else ZERO

    return read


def _scorer(mine: int, batch: int) -> Any:
    @device
    def score(z, held, keys, g, head, query, key, last, stop, mask, sizes, factors):
        """The scores of a batch of keys for head g of the block."""
        for u in range(batch):
            dot = ZERO
            for i in range(mine):
                dot += held[g * mine + i] * keys[u * mine + i]
            found = capped(warp_sum(dot), factors)
            found += bias_of(head + g, query, key + u, stop, mask, sizes, factors)
            z[g * batch + u] = found if key + u < last else MINUS_INF

    return score


def _carrier(mine: int, batch: int) -> Any:
    @device
    def carry(o, tops, weights, z, values, g):
        """Head g's maximum, weight and sum move on by the scores of a batch."""
        highest = tops[g]
        for u in range(batch):
            highest = max(highest, z[g * batch + u])
        base = ZERO if highest == MINUS_INF else highest
        shrink = math.exp(tops[g] - base)
        tops[g] = highest
        weights[g] *= shrink
        for i in range(mine):
            o[g * mine + i] *= shrink
        for u in range(batch):
            p = math.exp(z[g * batch + u] - base)
            weights[g] += p
            for i in range(mine):
                o[g * mine + i] += p * values[u * mine + i]

    return carry


@cache
def _attend(head_size: int, key_type: str, n_together: int) -> Any:
    """The kernel for this size of a head, type of keys, and number of heads of a block."""
    mine, batch = -(-head_size // LANES), _batch(head_size)
    read = _reader(key_loader(key_type), head_size, mine, batch)
    score, carry = _scorer(mine, batch), _carrier(mine, batch)
    of_ends, of_sums = (_WARPS, n_together, 2), (_WARPS, n_together, head_size)
    of_shares, of_heads = (n_together, _PARTS), n_together * mine
    of_keys, of_scores = batch * mine, n_together * batch
    await_others, release_others = waiting()

    @kernel
    def attend(out, lse, parts, tickets, q, k, v, span, mask, sinks, sizes, factors):
        ends = cuda.shared.array(of_ends, np.float32)
        sums = cuda.shared.array(of_sums, np.float32)
        shares = cuda.shared.array(of_shares, np.float32)
        ticket = cuda.shared.array(1, np.uint32)
        held, o = cuda.local.array(of_heads, np.float32), cuda.local.array(of_heads, np.float32)
        keys, values = cuda.local.array(of_keys, np.float32), cuda.local.array(of_keys, np.float32)
        z = cuda.local.array(of_scores, np.float32)
        tops = cuda.local.array(n_together, np.float32)
        weights = cuda.local.array(n_together, np.float32)
        release_others()
        await_others()
        part, n_parts, query = cuda.blockIdx.x, cuda.gridDim.x, cuda.blockIdx.z
        lane, warp = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        head = cuda.blockIdx.y * n_together
        row = np.int64(query) * sizes.n_heads + head
        key_head = head // (sizes.n_heads // sizes.n_key_heads)
        for g in range(n_together):
            tops[g], weights[g] = MINUS_INF, ZERO
            for i in range(mine):
                c = lane + i * LANES
                held[g * mine + i] = q[(row + g) * head_size + c] if c < head_size else ZERO
                o[g * mine + i] = ZERO
        start, stop = seen(span, query, sizes.n_keys)
        share = (stop - start + n_parts - 1) // n_parts
        last = min(stop, start + (part + 1) * share)
        for key in range(start + part * share + warp * batch, last, _WARPS * batch):
            read(keys, k, key, last, key_head, sizes.n_key_heads, lane)
            read(values, v, key, last, key_head, sizes.n_key_heads, lane)
            for g in range(n_together):
                score(z, held, keys, g, head, query, key, last, stop, mask, sizes, factors)
                carry(o, tops, weights, z, values, g)
        for g in range(n_together):
            for i in range(mine):
                if lane + i * LANES < head_size:
                    sums[warp, g, lane + i * LANES] = o[g * mine + i]
            ends[warp, g, 0], ends[warp, g, 1] = tops[g], weights[g]  # alike in all lanes
        cuda.syncthreads()
        for g in range(n_together):
            _put_part(parts, ((row + g) * n_parts + part) * (head_size + 2), sums, ends, g)
        of_query = cuda.blockIdx.z * cuda.gridDim.y + cuda.blockIdx.y
        if is_last(ticket, tickets, of_query, n_parts):
            _join(out, lse, parts, sinks, shares, query, head, n_parts, head_size, sizes)

    return begins_early(attend)


def bind(site: Site) -> Call:
    node = site.node
    q, k, v, span, *extras = site.src
    sizes, n_together = sizes_of(node, node.src[4:]), _heads(node)
    mask = extras[0] if node.params["masked"] else q
    sinks = extras[-1] if sizes.has_sinks else q
    n_queries, n_heads, head_size = node.shape
    if node.src[1].dtype is not F32:
        k, v = k.view(np.uint8), v.view(np.uint8)
    parts = site.scratch.view(np.float32)
    n_groups = n_heads // n_together
    tickets = site.constant(np.zeros(n_queries * n_groups, np.uint32))  # 0 between launches
    run = _attend(head_size, node.src[1].dtype.name, n_together)
    return launch(
        run, (_n_parts(node), n_groups, n_queries), _WARPS * LANES, site.stream, site.out,
        site.saved[0], parts, tickets, q, k, v, span, mask, sinks, sizes, factors_of(node),
    )  # fmt: skip
