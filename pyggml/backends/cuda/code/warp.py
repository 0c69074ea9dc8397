"""Warps: threads that run in step. The simulator has none: there a warp is one thread."""

from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.simulator import small

LANES = small(32, 1)
ALL = 0xFFFFFFFF  # lanes, as a mask


@device
def lanes_sum(x):
    """The sum over the threads of a block's row, a power of two up to a warp, in each of them."""
    step = cuda.blockDim.x >> 1
    while step > 0:
        x += cuda.shfl_xor_sync(ALL, x, step)
        step >>= 1
    return x


@device
def quad_sum(x):
    """The sum over the four lanes 4i to 4i + 3, in each of them."""
    x += cuda.shfl_xor_sync(ALL, x, 1)
    return x + cuda.shfl_xor_sync(ALL, x, 2)


@device
def quad_max(x):
    """The greatest over these four."""
    x = max(x, cuda.shfl_xor_sync(ALL, x, 1))
    return max(x, cuda.shfl_xor_sync(ALL, x, 2))


@device
def sync_warp():
    """Behind it all lanes of a warp see what each has written before it."""
    cuda.syncwarp()


@device
def warp_sum(x):
    """The sum over the lanes of a warp, in every lane."""
    for step in (16, 8, 4, 2, 1):
        x += cuda.shfl_xor_sync(ALL, x, step)
    return x


@device
def warp_max(x):
    """The greatest over the lanes of a warp, in every lane."""
    for step in (16, 8, 4, 2, 1):
        x = max(x, cuda.shfl_xor_sync(ALL, x, step))
    return x
