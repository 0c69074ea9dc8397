"""Sums and maxima over the threads that share a row.

A block is (threads of a row, rows): one row of a power of two of threads up to THREADS, or several
short ones with a warp each. All threads of a row must call these, and all get the result. `parts`
is `cuda.shared.array(THREADS, …)`; a warp alone does not touch it. The order of additions is
fixed, so that every run gives the same bits.
"""

import numpy as np

from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.code.ptx import take_ticket
from pyggml.backends.cuda.code.warp import ALL, warp_max, warp_sum
from pyggml.backends.cuda.runtime.driver import cuda


@device
def first_row():
    """The row with which a thread begins."""
    return cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y


@device
def rows_apart():
    """How far a thread's next row is."""
    return cuda.gridDim.x * cuda.blockDim.y


@device
def _exchange(x, parts):
    """Each lane's number becomes that of one warp; lanes n_warps apart have the same."""
    lane = cuda.threadIdx.x & 31
    if lane == 0:
        parts[cuda.threadIdx.x >> 5] = x
    cuda.syncthreads()
    x = parts[lane & ((cuda.blockDim.x >> 5) - 1)]
    cuda.syncthreads()  # before the next one writes
    return x


@device
def block_sum(x, parts):
    """The sum of one number of each thread."""
    x = warp_sum(x)
    if cuda.blockDim.x > 32:
        x = _exchange(x, parts)
        step = cuda.blockDim.x >> 6
        while step > 0:
            x += cuda.shfl_xor_sync(ALL, x, step)
            step >>= 1
    return x


@device
def block_max(x, parts):
    """The greatest of one number of each thread."""
    x = warp_max(x)
    if cuda.blockDim.x > 32:
        x = _exchange(x, parts)
        step = cuda.blockDim.x >> 6
        while step > 0:
            x = max(x, cuda.shfl_xor_sync(ALL, x, step))
            step >>= 1
    return x


@device
def is_last(ticket, tickets, at, n_blocks):
    """Whether this is the last of n_blocks blocks to come here; what the others wrote before can
    then be read.

    ticket: one uint32 of shared memory; tickets[at]: 0 before, and again after
    """
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:  # what it releases and acquires holds for all, as barriers order them
        ticket[0] = take_ticket(tickets, at, np.uint32(n_blocks - 1))
    cuda.syncthreads()
    return ticket[0] == n_blocks - 1
