"""Parts of a result: what blocks that share the keys of a query find, and what joins it.

A part is the sum of values that a block has found for a head, then its maximum and its weight. The
block of a query that ends last joins all parts, in their order. Where a query's blocks are a
cluster, cluster.py takes the place of this.

Places are unsigned here: of a signed one Numba asks whether it counts from the end.

parts    flat, (queries, heads, parts, head_size + 2)
shares   (heads of a block, MOST_PARTS), of each part in a head's result
out      flat, (queries, heads, head_size)
lse      flat, (heads, queries)
"""

import math
from typing import Any

import numpy as np

from pyggml.backends.cuda.attention.scores import MINUS_INF, NO_KEYS, ONE, ZERO
from pyggml.backends.cuda.code.blocks import is_last
from pyggml.backends.cuda.code.formulas import short_exp
from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.code.warp import LANES, warp_max, warp_sum
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.simulator import small

MOST_PARTS = small(16, 5)  # of a query's keys
_OF_LANE = -(-MOST_PARTS // LANES)


def _rounds(n: int, n_warps: int) -> int:
    """Of a block's threads, a number each, until all n have been seen."""
    return -(-n // (n_warps * LANES))


def part_summer(n_warps: int) -> Any:
    @device
    def part_sum(sums, ends, g, c):
        """Number c of head g of a block's part, and the head's maximum and weight, of its warps'.

        sums: (n_warps, n_together, head_size); ends: (n_warps, n_together, 2), maximum and weight
        """
        highest = MINUS_INF
        for w in range(n_warps):
            highest = max(highest, ends[w, g, 0])
        base = ZERO if highest == MINUS_INF else highest
        value, weight = ZERO, ZERO
        for w in range(n_warps):
            share = short_exp(ends[w, g, 0] - base)
            value += sums[w, g, c] * share
            weight += ends[w, g, 1] * share
        return value, highest, weight

    return part_sum


def _putter(n: int, n_warps: int) -> Any:
    """`put` for blocks of so many warps, whose heads have n numbers in all."""
    rounds, part_sum = _rounds(n, n_warps), part_summer(n_warps)

    @device
    def put(parts, first, step, sums, ends):
        """The sum, maximum and weight of each of a block's heads.

        parts: flat; those of the first head begin at `first`, those of the next `step` further
        """
        head_size = sums.shape[2]
        for r in range(rounds):
            i = cuda.threadIdx.x + r * n_warps * LANES
            if i < n:
                g, c = i // head_size, i % head_size
                value, highest, weight = part_sum(sums, ends, g, c)
                at = np.uint64(first + g * step)
                parts[at + np.uint64(c)] = value
                if c == 0:
                    end = at + np.uint64(head_size)
                    parts[end], parts[end + np.uint64(1)] = highest, weight

    return put


@device
def _share_out(shares, lse, parts, sinks, first, query, head, n_parts, head_size, sizes):
    """The share of each part in a head's result, shares (MOST_PARTS), by a warp; and the head's
    lse. first: where the head's parts begin"""
    step, lane = head_size + 2, cuda.threadIdx.x % LANES
    tops = cuda.local.array(_OF_LANE, np.float32)
    sink = sinks[head] if sizes.has_sinks else MINUS_INF
    highest, weight = sink, ZERO
    for u in range(_OF_LANE):
        part = lane + u * LANES
        tops[u] = parts[np.uint64(first + part * step + head_size)] if part < n_parts else MINUS_INF
        highest = max(highest, tops[u])
    highest = warp_max(highest)
    base = ZERO if highest == MINUS_INF else highest
    for u in range(_OF_LANE):
        part = lane + u * LANES
        tops[u] = short_exp(tops[u] - base)
        if part < n_parts:
            weight += parts[np.uint64(first + part * step + head_size + 1)] * tops[u]
    weight = warp_sum(weight) + short_exp(sink - base)
    whole = ONE / weight if weight > ZERO else ZERO
    for u in range(_OF_LANE):
        part = lane + u * LANES
        if part < n_parts:
            shares[part] = tops[u] * whole
    if lane == 0:
        log_sum = base + math.log(weight) if weight > ZERO else NO_KEYS
        lse[np.int64(head) * sizes.n_queries + query] = log_sum


def _joiner(n_together: int, head_size: int, n_warps: int) -> Any:
    """`join` for blocks of so many warps and heads."""
    n, step = n_together * head_size, head_size + 2
    rounds = _rounds(n, n_warps)

    @device
    def read(values, parts, row, i, n_parts):
        """Number i of the heads from row `row` on, of each part; all are on their way at once."""
        at = (row + i // head_size) * n_parts * step + i % head_size
        for part in range(MOST_PARTS):
            values[part] = parts[np.uint64(at + part * step)] if part < n_parts else ZERO

    @device
    def join(out, lse, parts, sinks, shares, query, head, n_parts, sizes):
        """The results of a block's heads, from `head` on, of all their parts."""
        row = np.int64(query) * sizes.n_heads + head
        values = cuda.local.array((rounds, MOST_PARTS), np.float32)
        for r in range(rounds):
            i = cuda.threadIdx.x + r * n_warps * LANES
            if i < n:
                read(values[r], parts, row, i, n_parts)
        g = cuda.threadIdx.x // LANES
        while g < n_together:
            first = (row + g) * n_parts * step
            _share_out(
                shares[g], lse, parts, sinks, first, query, head + g, n_parts, head_size, sizes
            )
            g += n_warps
        cuda.syncthreads()
        for r in range(rounds):
            i = cuda.threadIdx.x + r * n_warps * LANES
            if i < n:
                total = ZERO
                for part in range(MOST_PARTS):
                    if part < n_parts:
                        total += values[r, part] * shares[i // head_size, part]
                out[np.uint64(row * head_size + i)] = total

    return join


def joins(n_together: int, head_size: int, n_warps: int) -> tuple[Any, Any, Any]:
    """(place, begin, finish) of blocks of so many warps and heads; those along x share the keys of
    a query.

    place()          by the kernel's own code: which blocks run together
    begin(barrier)   by all threads, before all else; barrier: one uint64 of shared memory
    finish(barrier, out, lse, parts, tickets, sinks, sums, ends, query, head, sizes)
    """
    put = _putter(n_together * head_size, n_warps)
    join, step = _joiner(n_together, head_size, n_warps), head_size + 2
    of_shares = n_together, MOST_PARTS

    @device
    def place():
        pass

    @device
    def begin(_barrier):
        pass

    @device
    def finish(_barrier, out, lse, parts, tickets, sinks, sums, ends, query, head, sizes):
        shares = cuda.shared.array(of_shares, np.float32)
        ticket = cuda.shared.array(1, np.uint32)
        row, n_parts = np.int64(query) * sizes.n_heads + head, cuda.gridDim.x
        put(parts, (row * n_parts + cuda.blockIdx.x) * step, n_parts * step, sums, ends)
        if is_last(ticket, tickets, query * cuda.gridDim.y + cuda.blockIdx.y, n_parts):
            join(out, lse, parts, sinks, shares, query, head, n_parts, sizes)

    return place, begin, finish
