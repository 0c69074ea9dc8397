"""What the threads of a block compute together, in shared memory.

`parts` is `cuda.shared.array(THREADS, …)`. All threads of the block must call these, and all get
the result. A block has a power of two of threads, at most THREADS. The order of additions is fixed,
so that every run gives the same bits.
"""

from __future__ import annotations

from pyggml.backends.cuda.driver import cuda, device


@device
def block_sum(x, parts):
    """The sum of one number of each thread."""
    me, step = cuda.threadIdx.x, cuda.blockDim.x // 2
    parts[me] = x
    cuda.syncthreads()
    while step > 0:
        if me < step:
            parts[me] += parts[me + step]
        cuda.syncthreads()
        step //= 2
    total = parts[0]
    cuda.syncthreads()  # before the next one writes
    return total


@device
def block_max(x, parts):
    """The greatest of one number of each thread."""
    me, step = cuda.threadIdx.x, cuda.blockDim.x // 2
    parts[me] = x
    cuda.syncthreads()
    while step > 0:
        if me < step:
            parts[me] = max(parts[me], parts[me + step])
        cuda.syncthreads()
        step //= 2
    top = parts[0]
    cuda.syncthreads()
    return top
