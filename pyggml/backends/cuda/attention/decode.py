"""Attention of few queries over many keys, as in generation: blocks share the keys of a head.

A block takes some of the keys that a query sees, for some of the heads that share them; each of its
warps takes a few keys at a time, and a lane holds four neighbouring numbers of every 128 of a head.
The block of a query that ends last joins the sums of all, in their order. The heads of one
token may be made in the kernel (one_token.py).
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda import ptx
from pyggml.backends.cuda.attention.one_token import Token, of_none, of_token
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
from pyggml.backends.cuda.early import (
    await_others,
    begins_early,
    least_shared,
    release_others,
)
from pyggml.backends.cuda.fours import load_four, vectorizable
from pyggml.backends.cuda.kernel import Site
from pyggml.backends.cuda.launch import launch
from pyggml.backends.cuda.warp import LANES, warp_max, warp_sum
from pyggml.call import Call
from pyggml.dtypes import F16, F32
from pyggml.tensors import Tensor

if not SIMULATED:
    from pyggml.backends.cuda.byte_ptx import half_of

MOST_QUERIES = 2 if SIMULATED else 8
_WARPS = 2 if SIMULATED else 8
_PARTS = 5 if SIMULATED else 16  # of a query's keys, at most
_BLOCKS = 264  # that are wanted: two for each multiprocessor of a large card
_TOGETHER, _NUMBERS = 4, 1024  # heads of a block, and numbers of them, at most


class _Shape(NamedTuple):
    """What a kernel is compiled for: the size of a head, the type of keys, heads of a block, blocks
    of heads that share their keys, whether scores have a bias, whether all lie in fours, whether
    the heads of the token are made here."""

    head_size: int
    key_type: str
    n_together: int
    blocks: int
    has_bias: bool
    vectorized: bool
    makes_heads: bool


def takes(node: Tensor) -> bool:
    """Whether it is the path for this attention."""
    return node.shape[0] <= MOST_QUERIES


def _heads(node: Tensor) -> int:
    """Heads of a block: of those that share their keys."""
    sharing = node.shape[1] // node.src[1].shape[1]
    most = min(sharing, _TOGETHER, max(1, _NUMBERS // node.shape[2]))
    return next(n for n in range(most, 0, -1) if sharing % n == 0)


def _fours(head_size: int) -> int:
    """Of a head, by lane."""
    return -(-head_size // (4 * LANES))


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
def _put_parts(parts, first, step, sums, ends):
    """The sum, maximum and weight of each of a block's heads, of its warps'. first: where those of
    the first head begin; step: from head to head"""
    n_warps, n_together, head_size = sums.shape
    for i in range(cuda.threadIdx.x, n_together * head_size, _WARPS * LANES):
        g, c = i // head_size, i % head_size
        highest = MINUS_INF
        for w in range(n_warps):
            highest = max(highest, ends[w, g, 0])
        base = ZERO if highest == MINUS_INF else highest
        value, weight = ZERO, ZERO
        for w in range(n_warps):
            share = math.exp(ends[w, g, 0] - base)
            value += sums[w, g, c] * share
            weight += ends[w, g, 1] * share
        at = first + g * step
        parts[at + c] = value
        if c == 0:
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
def _read_parts(values, parts, row, i, n_parts, head_size):
    """Number i of the heads from row `row` on, of each part; all are on their way at once."""
    at = ((row + i // head_size) * n_parts) * (head_size + 2) + i % head_size
    for part in range(_PARTS):
        values[part] = parts[at + min(part, n_parts - 1) * (head_size + 2)]


@device
def _join(out, lse, parts, sinks, shares, query, head, n_parts, head_size, sizes):
    """The results of a block's heads, from `head` on, of all their parts."""
    n_together, i = shares.shape[0], cuda.threadIdx.x
    row = np.int64(query) * sizes.n_heads + head
    values = cuda.local.array(_PARTS, np.float32)
    _read_parts(values, parts, row, min(i, n_together * head_size - 1), n_parts, head_size)
    for g in range(cuda.threadIdx.x // LANES, n_together, _WARPS):
        first = (row + g) * n_parts * (head_size + 2)
        _share_out(shares[g], lse, parts, sinks, first, query, head + g, n_parts, head_size, sizes)
    cuda.syncthreads()
    while i < n_together * head_size:
        total = ZERO
        for part in range(_PARTS):
            if part < n_parts:
                total += values[part] * shares[i // head_size, part]
        out[row * head_size + i] = total
        i += _WARPS * LANES
        if i < n_together * head_size:
            _read_parts(values, parts, row, i, n_parts, head_size)


def _four_loader(name: str, head_size: int, vectorized: bool) -> Any:
    """load(x, at, c): numbers c to c + 3 of the head that begins at number `at`, as float32."""
    if vectorized and name == F16.name and not SIMULATED:

        @device
        def load_halves(x, at, c):
            low, high = ptx.load_pair(x, 2 * (at + c))
            half = np.uint32(16)
            return half_of(low), half_of(low >> half), half_of(high), half_of(high >> half)

        return load_halves
    if vectorized and name == F32.name:

        @device
        def load_floats(x, at, c):
            return load_four(x, at + c)

        return load_floats
    load = key_loader(name)

    @device
    def one(x, at, c):
        return load(x, at + c) if c < head_size else ZERO

    @device
    def load_each(x, at, c):
        return one(x, at, c), one(x, at, c + 1), one(x, at, c + 2), one(x, at, c + 3)

    return load_each


def _reader(name: str, shape: _Shape) -> Any:
    load, head_size = _four_loader(name, shape.head_size, shape.vectorized), shape.head_size
    fours = _fours(head_size)

    @device
    def read(into, to, x, at, lane):
        """A lane's numbers of the head that begins at `at`."""
        for i in range(fours):
            c = 4 * (lane + i * LANES)
            four = load(x, at, c) if c < head_size else (ZERO, ZERO, ZERO, ZERO)
            for j in range(4):
                into[to + 4 * i + j] = four[j]

    return read


def _scorer(shape: _Shape, mine: int, batch: int) -> Any:
    @device
    def score_head(z, held, keys, g, head, query, key, last, mask, sizes, factors):
        for u in range(batch):
            dot = ZERO
            for i in range(mine):
                dot += held[g * mine + i] * keys[u * mine + i]
            z[g * batch + u] = warp_sum(dot)
        for u in range(batch):
            found = capped(z[g * batch + u], factors)
            if shape.has_bias and key + u < last:
                found += bias_of(head + g, query, key + u, last, mask, sizes, factors)
            z[g * batch + u] = found if key + u < last else MINUS_INF

    @device
    def score(z, held, keys, head, query, key, last, mask, sizes, factors):
        """The scores of a batch of keys for all heads of the block."""
        for g in range(shape.n_together):
            score_head(z, held, keys, g, head, query, key, last, mask, sizes, factors)

    return score


def _carrier(shape: _Shape, mine: int, batch: int) -> Any:
    @device
    def carry_head(o, tops, weights, z, values, g):
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

    @device
    def carry(o, tops, weights, z, values):
        """The maximum, weight and sum of each head move on by the scores of a batch."""
        for g in range(shape.n_together):
            carry_head(o, tops, weights, z, values, g)

    return carry


def _fetcher(shape: _Shape, mine: int, batch: int) -> Any:
    read = _reader(shape.key_type, shape)

    @device
    def fetch(keys, values, k, v, key, last, key_head, sizes, lane):
        """A batch of keys and values, if there is one."""
        if key < last:
            for u in range(batch):
                at = np.int64(min(key + u, last - 1)) * sizes.n_key_heads + key_head
                read(keys, u * mine, k, at * shape.head_size, lane)
                read(values, u * mine, v, at * shape.head_size, lane)

    return fetch


def _sums_putter(shape: _Shape, mine: int) -> Any:
    @device
    def put_sums(sums, ends, o, tops, weights, warp, lane):
        """A warp's sums of each head; its maximum and weight, alike in all lanes."""
        for g in range(shape.n_together):
            for i in range(mine):
                c = 4 * (lane + i // 4 * LANES) + i % 4
                if c < shape.head_size:
                    sums[warp, g, c] = o[g * mine + i]
            ends[warp, g, 0], ends[warp, g, 1] = tops[g], weights[g]

    return put_sums


@cache
def _attend(shape: _Shape) -> Any:
    head_size, n_together, batch = shape.head_size, shape.n_together, _batch(shape.head_size)
    mine, sharing = 4 * _fours(head_size), shape.blocks
    fetch, read_query = _fetcher(shape, mine, batch), _reader(F32.name, shape)
    made_here = of_token(shape.key_type, n_together, batch) if shape.makes_heads else of_none()
    read_token, make_heads, keep_token, replace = made_here
    put_sums = _sums_putter(shape, mine)
    score, carry = _scorer(shape, mine, batch), _carrier(shape, mine, batch)
    of_ends, of_sums = (_WARPS, n_together, 2), (_WARPS, n_together, head_size)
    of_shares, of_heads = (n_together, _PARTS), n_together * mine
    of_keys, of_scores, of_own = batch * mine, n_together * batch, 2 * mine

    @partial(kernel, shared_bytes=least_shared())
    def attend(out, lse, parts, tickets, q, k, v, span, mask, sinks, sizes, factors, token):
        ends = cuda.shared.array(of_ends, np.float32)
        sums = cuda.shared.array(of_sums, np.float32)
        shares = cuda.shared.array(of_shares, np.float32)
        ticket = cuda.shared.array(1, np.uint32)
        held, o = cuda.local.array(of_heads, np.float32), cuda.local.array(of_heads, np.float32)
        keys, values = cuda.local.array(of_keys, np.float32), cuda.local.array(of_keys, np.float32)
        z, own = cuda.local.array(of_scores, np.float32), cuda.local.array(of_own, np.float32)
        tops = cuda.local.array(n_together, np.float32)
        weights = cuda.local.array(n_together, np.float32)
        part, n_parts, query = cuda.blockIdx.x, cuda.gridDim.x, cuda.blockIdx.z
        lane, warp = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        head, key_head = cuda.blockIdx.y * n_together, cuda.blockIdx.y // sharing
        row = np.int64(query) * sizes.n_heads + head
        start, last = seen(span, query, sizes.n_keys)
        key = start + (part * _WARPS + warp) * batch
        fetch(keys, values, k, v, key, last, key_head, sizes, lane)
        await_others()
        for g in range(n_together):
            tops[g], weights[g] = MINUS_INF, ZERO
            read_query(held, g * mine, q, (row + g) * head_size, lane)
            for i in range(mine):
                o[g * mine + i] = ZERO
        new_row, turns = read_token(own, token, key_head)
        make_heads(held, own, token, turns)
        is_first = part == 0 and warp == 0 and cuda.blockIdx.y % sharing == 0
        keep_token(own, token, new_row, key_head, is_first)
        while key < last:
            replace(keys, values, own, new_row, key, last)
            score(z, held, keys, head, query, key, last, mask, sizes, factors)
            carry(o, tops, weights, z, values)
            key += n_parts * (_WARPS * batch)
            fetch(keys, values, k, v, key, last, key_head, sizes, lane)
        release_others()
        put_sums(sums, ends, o, tops, weights, warp, lane)
        cuda.syncthreads()
        step = head_size + 2
        _put_parts(parts, (row * n_parts + part) * step, n_parts * step, sums, ends)
        of_query = cuda.blockIdx.z * cuda.gridDim.y + cuda.blockIdx.y
        if is_last(ticket, tickets, of_query, n_parts):
            _join(out, lse, parts, sinks, shares, query, head, n_parts, head_size, sizes)

    return begins_early(attend, lambda arguments: arguments[5:8])  # keys, values and their span


def bind(site: Site, token: Token | None = None) -> Call:
    """The launch. token: of the only query, whose heads are not made yet, nor in the cache."""
    node = site.node
    q, k, v, span, *extras = site.src
    q = q if token is None else token.q
    sizes, n_together = sizes_of(node, node.src[4:]), _heads(node)
    mask = extras[0] if node.params["masked"] else q
    sinks = extras[-1] if sizes.has_sinks else q
    n_queries, n_heads, head_size = node.shape
    vectorized = head_size % 4 == 0 and vectorizable(q, k, v)
    if node.src[1].dtype is not F32:
        k, v = k.view(np.uint8), v.view(np.uint8)
    parts = site.scratch.view(np.float32)
    n_groups = n_heads // n_together
    tickets = site.constant(np.zeros(n_queries * n_groups, np.uint32))  # 0 between launches
    has_bias, blocks = sizes.steep_heads > 0, n_groups // sizes.n_key_heads
    shape = _Shape(
        head_size, node.src[1].dtype.name, n_together, blocks, has_bias, vectorized,
        token is not None,
    )  # fmt: skip
    run = _attend(shape)
    return launch(
        run, (_n_parts(node), n_groups, n_queries), _WARPS * LANES, site.stream, site.out,
        site.saved[0], parts, tickets, q, k, v, span, mask, sinks, sizes, factors_of(node),
        0 if token is None else token, shared_bytes=least_shared(),
    )  # fmt: skip
