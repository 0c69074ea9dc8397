"""Numbers spread over a warp: each lane has one of n, and neighbouring lanes have the same one.

n is a power of two up to 32. Under the simulator, where a warp is one thread, that has all n.
"""

from typing import Any

import numpy as np

from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.code.warp import ALL, LANES
from pyggml.backends.cuda.runtime.driver import cuda


class Spread:
    """The device functions for n numbers, in groups of `together`.

    n_own              how many numbers a lane has
    number(i)          which one its number i is
    sums(x)            x (n,): sums over the warp; after it x[: n_own] are the lane's own
    greatest(x, i)     of the group of x[i]
    total(x, i)        the sum of that group
    of(x, j)           number j, in every lane
    """

    def __init__(self, n: int, together: int) -> None:
        assert n & n - 1 == together & together - 1 == 0, f"{n} in groups of {together}"
        self.n = n
        self.n_own = n if LANES == 1 else 1
        pair = _of_thread(together) if LANES == 1 else _of_warp(n, together)
        self.number, self.sums, self.greatest, self.total, self.of = pair


def _of_thread(together: int) -> tuple[Any, ...]:
    def number(i):
        return i

    def sums(x):
        pass

    def group(x, i):
        return x[i // together * together :][:together]

    def greatest(x, i):
        return max(group(x, i))

    def total(x, i):
        return sum(group(x, i))

    def of(x, j):
        return x[j]

    return number, sums, greatest, total, of


def _of_warp(n: int, together: int) -> tuple[Any, ...]:
    lanes = LANES // n  # that have the same number
    n_halvings, n_further, n_within = (k.bit_length() - 1 for k in (n, lanes, together))

    @device
    def number(i):
        return np.int32((cuda.threadIdx.x & 31) // lanes)

    @device
    def sums(x):
        for h in range(n_halvings):
            half, step = n >> h + 1, LANES >> h + 1
            is_upper = cuda.threadIdx.x & step != 0
            for i in range(half):
                low, high = x[i], x[i + half]
                x[i] = (high if is_upper else low) + cuda.shfl_xor_sync(
                    ALL, low if is_upper else high, step
                )
        for h in range(n_further):
            x[0] += cuda.shfl_xor_sync(ALL, x[0], lanes >> h + 1)

    @device
    def greatest(x, i):
        value = x[0]
        for h in range(n_within):
            value = max(value, cuda.shfl_xor_sync(ALL, value, lanes << h))
        return value

    @device
    def total(x, i):
        value = x[0]
        for h in range(n_within):
            value += cuda.shfl_xor_sync(ALL, value, lanes << h)
        return value

    @device
    def of(x, j):
        return cuda.shfl_sync(ALL, x[0], j * lanes)

    return number, sums, greatest, total, of
