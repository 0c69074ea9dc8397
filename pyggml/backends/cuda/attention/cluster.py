"""Parts of a result joined by a cluster: blocks that write to each other's shared memory.

Each block of a query's keys finds a sum of values for each number of its heads, and a maximum and a
weight for each head. It sends every number to the block of the cluster that joins this number, and
the maxima and weights to all. So nothing goes through the card's memory, and no block waits for a
last one. Cards have clusters since Hopper (compute capability 9.0).
"""

import math
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.attention.parts import part_summer
from pyggml.backends.cuda.attention.scores import MINUS_INF, NO_KEYS, ZERO
from pyggml.backends.cuda.code import cluster_ptx, ptx
from pyggml.backends.cuda.code.formulas import short_exp
from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.code.warp import LANES
from pyggml.backends.cuda.runtime.driver import CudaSupportError, cuda
from pyggml.backends.cuda.runtime.simulator import on_card

_SINCE = (9, 0)  # compute capability
_LN_2 = np.float32(math.log(2))
MOST_BLOCKS = 8  # of a cluster, on every card that has them


@on_card
def has_clusters() -> bool:
    """Whether this card has clusters; True where there is no card, and kernels only compile."""
    try:
        return bool(cuda.get_current_device().compute_capability >= _SINCE)
    except CudaSupportError:
        return True


class _Shares(NamedTuple):
    """How the n numbers of n_together heads are shared out: each of n_parts blocks, of so many
    threads, joins `most` of them, the last ones fewer or none."""

    n_together: int
    head_size: int
    threads: int
    n_parts: int
    n: int
    most: int


def joins(n_together: int, head_size: int, n_warps: int, n_parts: int) -> tuple[Any, Any, Any]:
    """(place, begin, finish) of blocks of so many warps and heads, as those of parts.py: n_parts,
    at most head_size, are a cluster."""
    n = n_together * head_size
    shares = _Shares(n_together, head_size, n_warps * LANES, n_parts, n, -(-n // n_parts))
    place = cluster_ptx.clusters_of(n_parts)
    return place, _beginner(shares), _finisher(shares, part_summer(n_warps))


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


def _sender(shares: _Shares, part_sum: Any) -> Any:
    n_together, head_size, threads, n_parts, n, most = shares
    rounds = -(-n // threads)

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


def _joiner(n_parts: int) -> Any:
    @device
    def join(numbers, tops, i, g, sink):
        """Number i of a block, of head g, over all parts; and the head's lse.

        numbers: (n_parts, most); tops: (n_parts, n_together, 2), maximum and weight
        """
        highest = sink
        for p in range(n_parts):
            highest = max(highest, tops[p, g, 0])
        base = ZERO if highest == MINUS_INF else highest
        weight, total = short_exp(sink - base), ZERO
        for p in range(n_parts):
            share = short_exp(tops[p, g, 0] - base)
            weight += tops[p, g, 1] * share
            total += numbers[p, i] * share
        if weight == ZERO:  # a weight that is no number makes a result that is none
            return ZERO, NO_KEYS
        return total * ptx.reciprocal(weight), base + ptx.logarithm_of_two(weight) * _LN_2

    return join


def _finisher(shares: _Shares, part_sum: Any) -> Any:
    n_together, head_size, threads, n_parts, n, most = shares
    send, join, rounds = _sender(shares, part_sum), _joiner(n_parts), -(-most // threads)
    of_numbers, of_tops = (n_parts, most), (n_parts, n_together, 2)

    @device
    def finish(barrier, out, lse, _parts, _tickets, sinks, sums, ends, query, head, sizes):
        numbers = cuda.shared.array(of_numbers, np.float32)
        tops = cuda.shared.array(of_tops, np.float32)
        cluster_ptx.await_cluster()  # until then another block may not have begun
        send(numbers, tops, barrier, sums, ends)
        if cuda.threadIdx.x < most:  # of each block some thread: others send to it
            cluster_ptx.await_bytes(barrier)
        first = (np.int64(query) * sizes.n_heads + head) * head_size
        for r in range(rounds):
            i = np.uint32(cuda.threadIdx.x + r * threads)
            number = np.uint32(cuda.blockIdx.x * most + i)
            if i < most and number < n:
                g = number // np.uint32(head_size)
                sink = sinks[head + g] if sizes.has_sinks else MINUS_INF
                value, of_head = join(numbers, tops, i, g, sink)
                out[np.uint64(first + number)] = value
                if number % np.uint32(head_size) == 0:
                    lse[np.uint64((head + g) * sizes.n_queries + query)] = of_head

    return finish
