"""Warps: threads that run in step. The simulator has none: there a warp is one thread."""

from __future__ import annotations

from pyggml.backends.cuda.runtime.driver import SIMULATED, cuda, device

LANES = 1 if SIMULATED else 32
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


if SIMULATED:

    def sync_warp():
        pass

    def warp_sum(x):
        return x

    def warp_max(x):
        return x
else:

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
