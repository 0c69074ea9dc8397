"""How the blocks that share the keys of a query join their parts of its result.

A part is, of each head of a block, the sum of values, and the maximum and the weight of its scores.

in a cluster     Each number is sent to the block that joins it, maxima and weights to all: nothing
                 goes through the card's memory, and no block waits for a last one.
through memory   The block that ends last joins all: of more parts than a cluster has blocks, and on
                 cards before Hopper (compute capability 9.0), which have no clusters.

sums     (n_warps, n_together, head_size), of a block's warps
ends     (n_warps, n_together, 2), maximum and weight
parts    flat, (queries, groups of heads, parts, n_together · (head_size + 2))
out      flat, (queries, heads, head_size)
lse      flat, (heads, queries)

Places are unsigned here: of a signed one Numba asks whether it counts from the end.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.attention.scores import MINUS_INF, NO_KEYS, ZERO, base_of
from pyggml.backends.cuda.code import cluster_ptx, ptx
from pyggml.backends.cuda.code.blocks import is_last
from pyggml.backends.cuda.code.formulas import short_exp
from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.code.warp import LANES
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.simulator import small

MOST_PARTS = small(16, 5)  # of a query's keys
_LN_2 = np.float32(math.log(2))


class _Shares(NamedTuple):
    """How the n numbers of n_together heads are shared out: each of n_parts blocks, of so many
    threads, joins `most` of them, the last ones fewer or none."""

    n_together: int
    head_size: int
    threads: int
    n_parts: int
    n: int
    most: int


def _part_summer(n_warps: int) -> Any:
    @device
    def part_sum(sums, ends, g, c):
        """Number c of head g in a block's part, and the head's maximum and weight."""
        highest = MINUS_INF
        for w in range(n_warps):
            highest = max(highest, ends[w, g, 0])
        base = base_of(highest)
        value, weight = ZERO, ZERO
        for w in range(n_warps):
            share = short_exp(ends[w, g, 0] - base)
            value += sums[w, g, c] * share
            weight += ends[w, g, 1] * share
        return value, highest, weight

    return part_sum


def _joiner(head_size: int, n_parts: int) -> Any:
    @device
    def join(out, lse, numbers, i, tops, number, sinks, query, head, sizes):
        """Write a number of the heads from `head` on, and the lse of the head that it begins.

        numbers: (n_parts, …), of which [:, i] are its parts; tops: (n_parts, n_together, 2)
        """
        g = number // np.uint32(head_size)
        sink = sinks[head + g] if sizes.has_sinks else MINUS_INF
        highest = sink
        for p in range(n_parts):
            highest = max(highest, tops[p, g, 0])
        base = base_of(highest)
        weight, total = short_exp(sink - base), ZERO
        for p in range(n_parts):
            share = short_exp(tops[p, g, 0] - base)
            weight += tops[p, g, 1] * share
            total += numbers[p, i] * share
        sees_none = weight == ZERO  # a weight that is no number makes a result that is none
        first = (np.int64(query) * sizes.n_heads + head) * head_size
        out[np.uint64(first + number)] = ZERO if sees_none else total * ptx.reciprocal(weight)
        if number % np.uint32(head_size) == 0:
            lse[np.uint64((head + g) * sizes.n_queries + query)] = (
                NO_KEYS if sees_none else base + ptx.logarithm_of_two(weight) * _LN_2
            )

    return join


@device
def _nothing(*_):
    pass


def joiners(n_together: int, head_size: int, n_warps: int, n_parts: int) -> tuple[Any, Any, Any]:
    """(place, begin, finish) of blocks of so many warps and heads; those along x share keys.

    place()          by the kernel's own code: which blocks run together
    begin(barrier)   by all threads, before all else; barrier: one uint64 of shared memory
    finish(barrier, out, lse, parts, tickets, sinks, sums, ends, query, head, sizes)

    n_parts: blocks that are a cluster, at most head_size; 0 for some, at most MOST_PARTS, that are
    none
    """
    n = n_together * head_size
    shares = _Shares(n_together, head_size, n_warps * LANES, n_parts, n, -(-n // max(1, n_parts)))
    if n_parts:
        return cluster_ptx.clusters_of(n_parts), _beginner(shares), _finisher(shares)
    return _nothing, _nothing, _last_finisher(shares)


# -- in a cluster --------------------------------------------------------------------------------


def _beginner(shares: _Shares) -> Any:
    n, most, n_parts = shares.n, shares.most, shares.n_parts
    of_tops = 2 * n_parts * shares.n_together  # numbers that each block gets besides

    @device
    def begin(barrier):
        if cuda.threadIdx.x == 0:
            own = max(min(most, n - cuda.blockIdx.x * most), 0)
            cluster_ptx.expect_bytes(barrier, np.uint32(4 * (n_parts * own + of_tops)))
        cluster_ptx.arrive_in_cluster()

    return begin


def _sender(shares: _Shares) -> Any:
    n_together, head_size, threads, n_parts, n, most = shares
    rounds, part_sum = -(-n // threads), _part_summer(threads // LANES)

    @device
    def send(numbers, tops, barrier, sums, ends):
        """Send what this block has found for its heads."""
        part = cuda.blockIdx.x
        for r in range(rounds):
            i = np.uint32(cuda.threadIdx.x + r * threads)
            if i < n:
                g, c = i // np.uint32(head_size), i % np.uint32(head_size)
                value, highest, weight = part_sum(sums, ends, g, c)
                at = part * most + i % np.uint32(most)
                cluster_ptx.send(numbers, 4 * at, barrier, i // np.uint32(most), value)
                if c < n_parts:
                    at = 8 * (part * n_together + g)
                    cluster_ptx.send(tops, at, barrier, c, highest)
                    cluster_ptx.send(tops, at + 4, barrier, c, weight)

    return send


def _finisher(shares: _Shares) -> Any:
    n_together, head_size, threads, n_parts, n, most = shares
    send, join, rounds = _sender(shares), _joiner(head_size, n_parts), -(-most // threads)
    of_numbers, of_tops = (n_parts, most), (n_parts, n_together, 2)

    @device
    def finish(barrier, out, lse, _parts, _tickets, sinks, sums, ends, query, head, sizes):
        numbers = cuda.shared.array(of_numbers, np.float32)
        tops = cuda.shared.array(of_tops, np.float32)
        cluster_ptx.await_cluster()  # until then another block may not have begun
        send(numbers, tops, barrier, sums, ends)
        if cuda.threadIdx.x < most:  # of each block some thread: others send to it
            cluster_ptx.await_bytes(barrier)
        for r in range(rounds):
            i = np.uint32(cuda.threadIdx.x + r * threads)
            number = np.uint32(cuda.blockIdx.x * most + i)
            if i < most and number < n:
                join(out, lse, numbers, i, tops, number, sinks, query, head, sizes)

    return finish


# -- through memory ------------------------------------------------------------------------------


def _putter(n: int, threads: int) -> Any:
    part_sum = _part_summer(threads // LANES)

    @device
    def put(parts, first, sums, ends):
        """The sums of a block's heads, then their maxima and weights."""
        head_size = sums.shape[2]
        for i in range(cuda.threadIdx.x, n, threads):
            g, c = i // head_size, i % head_size
            value, highest, weight = part_sum(sums, ends, g, c)
            parts[np.uint64(first + i)] = value
            if c == 0:
                end = np.uint64(first + n + 2 * g)
                parts[end], parts[end + np.uint64(1)] = highest, weight

    return put


def _last_finisher(shares: _Shares) -> Any:
    n_together, head_size, threads, _, n, _ = shares
    of_tops, size = (MOST_PARTS, n_together, 2), n + 2 * n_together
    put, join = _putter(n, threads), _joiner(head_size, MOST_PARTS)
    rounds, per_part = -(-n // threads), 2 * n_together

    @device
    def read(values, tops, parts, first, n_parts):
        """All parts of the numbers that a thread joins, which are on their way at once, and a share
        of the maxima and weights."""
        for r in range(rounds):
            i = min(cuda.threadIdx.x + r * threads, n - 1)
            for p in range(MOST_PARTS):
                values[r, p, 0] = parts[np.uint64(first + p * size + i)] if p < n_parts else ZERO
        for e in range(cuda.threadIdx.x, MOST_PARTS * per_part, threads):
            p, i = e // per_part, e % per_part
            absent = ZERO if i & 1 else MINUS_INF
            tops[p, i >> 1, i & 1] = (
                parts[np.uint64(first + p * size + n + i)] if p < n_parts else absent
            )

    @device
    def finish(_barrier, out, lse, parts, tickets, sinks, sums, ends, query, head, sizes):
        tops = cuda.shared.array(of_tops, np.float32)
        ticket = cuda.shared.array(1, np.uint32)
        values = cuda.local.array((rounds, MOST_PARTS, 1), np.float32)
        group, n_parts = query * cuda.gridDim.y + cuda.blockIdx.y, cuda.gridDim.x
        first = np.int64(group) * n_parts * size
        put(parts, first + cuda.blockIdx.x * size, sums, ends)
        if is_last(ticket, tickets, group, n_parts):
            read(values, tops, parts, first, n_parts)
            cuda.syncthreads()
            for r in range(rounds):
                number = np.uint32(cuda.threadIdx.x + r * threads)
                if number < n:
                    join(out, lse, values[r], 0, tops, number, sinks, query, head, sizes)

    return finish
