"""Parts of a result joined by a cluster: blocks that write to each other's shared memory.

Each block of a query's keys finds a sum of values for each number of its heads, and a maximum and a
weight for each head. It sends every number to the block of the cluster that joins this number, and
the maxima and weights to all. So nothing goes through the card's memory, and no block waits for a
last one. Cards have clusters since Hopper (compute capability 9.0); others take parts.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pyggml.backends.cuda.attention.parts import part_summer
from pyggml.backends.cuda.attention.scores import MINUS_INF, NO_KEYS, ZERO
from pyggml.backends.cuda.driver import SIMULATED, CudaSupportError, cuda, device
from pyggml.backends.cuda.formulas import short_exp
from pyggml.backends.cuda.warp import LANES

_SINCE = (9, 0)  # compute capability
_LN_2 = np.float32(math.log(2))
MOST_BLOCKS = 8  # of a cluster, on every card that has them


def has_clusters() -> bool:
    """Whether this card has clusters; True of a card that there is none of."""
    if SIMULATED:
        return False
    try:
        return bool(cuda.get_current_device().compute_capability >= _SINCE)
    except CudaSupportError:
        return True


def joins(n_together: int, head_size: int, n_warps: int, n_parts: int) -> tuple[Any, Any, Any]:
    """(place, begin, finish) of blocks of so many warps and heads, as those of parts.py: n_parts of
    them are a cluster."""
    from pyggml.backends.cuda import cluster_ptx, ptx

    threads = n_warps * LANES
    n, n_tops = n_together * head_size, n_parts * n_together
    most = -(-n // n_parts)  # numbers that a block joins
    rounds_of_all, rounds = -(-n // threads), -(-most // threads)
    of_numbers, of_tops = (n_parts, most), (n_parts, n_together, 2)
    part_sum = part_summer(n_warps)

    @device
    def begin(barrier):
        if cuda.threadIdx.x == 0:
            here = min(most, n - cuda.blockIdx.x * most)
            cluster_ptx.expect_bytes(barrier, np.uint32(4 * (n_parts * max(here, 0) + 2 * n_tops)))
        cluster_ptx.arrive_in_cluster()

    @device
    def send(numbers, tops, barrier, sums, ends):
        """Send what this block has found for its heads."""
        part = cuda.blockIdx.x
        for r in range(rounds_of_all):
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

    @device
    def join(numbers, tops, i, g, sink):
        """Number i of a block, of its head g, over all parts; and the head's lse."""
        highest = sink
        for p in range(n_parts):
            highest = max(highest, tops[p, g, 0])
        base = ZERO if highest == MINUS_INF else highest
        weight, total = short_exp(sink - base), ZERO
        for p in range(n_parts):
            share = short_exp(tops[p, g, 0] - base)
            weight += tops[p, g, 1] * share
            total += numbers[p, i] * share
        if weight > ZERO:
            return total * ptx.reciprocal(weight), base + ptx.logarithm_of_two(weight) * _LN_2
        return ZERO, NO_KEYS

    @device
    def finish(barrier, out, lse, _parts, _tickets, sinks, sums, ends, query, head, sizes):
        numbers = cuda.shared.array(of_numbers, np.float32)
        tops = cuda.shared.array(of_tops, np.float32)
        cluster_ptx.await_cluster()  # until then another block may not have begun
        send(numbers, tops, barrier, sums, ends)
        first = (np.int64(query) * sizes.n_heads + head) * head_size
        if cuda.threadIdx.x < most:  # a block to which others send must not end
            cluster_ptx.await_bytes(barrier)
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

    return cluster_ptx.clusters_of(n_parts), begin, finish
