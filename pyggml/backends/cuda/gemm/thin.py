"""Float32 products with one side of at most 16, as those of A and B of an adapter: exact, at the
speed of the memory, where cuBLAS takes twice as long.

NARROW   long rows of A times few rows of B: a warp takes four rows of A
TALL     a long sum between a long side and a short one: a thread takes a row of the long side, a
         block 64 steps of the sum; a second kernel adds the blocks' sums in their order
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.driver import SIMULATED, cuda, kernel
from pyggml.backends.cuda.gemm.problem import Operands, Path, Problem
from pyggml.backends.cuda.launch import in_turn, launch, per_element
from pyggml.backends.cuda.warp import LANES, warp_sum
from pyggml.call import Call
from pyggml.dtypes import F32

MOST = 16  # of the short side
_LONG = 8 if SIMULATED else 1024  # of the long side, from which these are ahead of cuBLAS
_EACH = 4  # rows of A of a warp
_WARPS = 2 if SIMULATED else 8
_STEPS = 8 if SIMULATED else 64  # of the sum in a block
_THREADS = 4 if SIMULATED else 128


def _short(n: int) -> int:
    """The side that kernels are made for."""
    return next(size for size in (4, 8, MOST) if n <= size)


@cache
def _narrow(short: int) -> Any:
    @kernel
    def multiply(c, a, b, sizes, steps, accumulate):
        sums = cuda.local.array((_EACH, short), np.float32)
        m, n, depth = sizes
        lane, warp = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        for first in range(
            (cuda.blockIdx.x * _WARPS + warp) * _EACH, m, cuda.gridDim.x * _WARPS * _EACH
        ):
            for r in range(_EACH):
                for j in range(short):
                    sums[r, j] = 0
            for k in range(lane, depth, LANES):
                for j in range(short):
                    w = b[j * steps[1] + k * steps[2]] if j < n else np.float32(0)
                    for r in range(_EACH):
                        if first + r < m:
                            sums[r, j] += w * a[(first + r) * steps[0] + k]
            for r in range(_EACH):
                for j in range(short):
                    total = warp_sum(sums[r, j])
                    if lane == 0 and j < n and first + r < m:
                        at = (first + r) * n + j
                        c[at] = c[at] + total if accumulate else total

    return multiply


def _narrow_takes(p: Problem) -> bool:
    is_thin = p.is_single and p.b.dtype is F32 and p.n <= MOST
    return is_thin and p.a.k == 1 and p.m >= _LONG and p.k >= LANES


def _bind_narrow(p: Problem, o: Operands) -> Call:
    grid = 2 if SIMULATED else -(-p.m // (_WARPS * _EACH))
    arguments = (o.c, o.a, o.b, (p.m, p.n, p.k), (p.a.row, p.b.row, p.b.k), o.accumulate)
    return launch(_narrow(_short(p.n)), grid, _WARPS * LANES, o.stream, *arguments)


@cache
def _tall(short: int) -> Any:
    @kernel
    def multiply(parts, long_side, short_side, sizes, steps):
        """parts (blocks of k, long, short): sums over some of k."""
        sums = cuda.local.array(short, np.float32)
        n_long, n_short, depth = sizes
        first, row = cuda.blockIdx.y * _STEPS, cuda.grid(1)
        if row < n_long:
            for j in range(short):
                sums[j] = 0
            for k in range(first, min(first + _STEPS, depth)):
                x = long_side[row + k * steps[0]]
                for j in range(short):
                    if j < n_short:
                        sums[j] += x * short_side[j * steps[1] + k * steps[2]]
            for j in range(short):
                if j < n_short:
                    parts[(cuda.blockIdx.y * n_short + j) * n_long + row] = sums[j]

    return multiply


@kernel
def _join(c, parts, n_long, n_short, n_blocks, is_long_first, accumulate):
    """c (+)= the blocks' sums; c is (long, short), or the other way round."""
    for i in range(cuda.grid(1), c.size, cuda.gridsize(1)):
        row, j = (i // n_short, i % n_short) if is_long_first else (i % n_long, i // n_long)
        total = np.float32(0)
        for block in range(n_blocks):
            total += parts[(block * n_short + j) * n_long + row]
        c[i] = c[i] + total if accumulate else total


def _tall_takes(p: Problem) -> bool:
    if not p.is_single or p.b.dtype is not F32 or p.k < _LONG:
        return False
    return (p.n <= MOST < p.m and p.a.row == 1) or (p.m <= MOST < p.n and p.b.row == 1)


def _n_blocks(p: Problem) -> int:
    return -(-p.k // _STEPS)


def _tall_scratch(p: Problem) -> int:
    return F32.block_bytes * _n_blocks(p) * p.m * p.n


def _bind_tall(p: Problem, o: Operands) -> Call:
    is_long_first = p.n <= MOST
    sides = ((o.a, p.a, p.m), (o.b, p.b, p.n))
    (x, of_x, n_long), (y, of_y, n_short) = sides if is_long_first else sides[::-1]
    parts = o.scratch[: _tall_scratch(p)].view(np.float32)
    grid = -(-n_long // _THREADS), _n_blocks(p)
    steps, sizes = (of_x.k, of_y.row, of_y.k), (n_long, n_short, p.k)
    run = _tall(_short(n_short))
    rest = (n_long, n_short, _n_blocks(p), is_long_first, o.accumulate)
    return in_turn(
        launch(run, grid, _THREADS, o.stream, parts, x, y, sizes, steps),
        per_element(_join, p.m * p.n, o.stream, o.c, parts, *rest),
    )


NARROW = Path(name="narrow", takes=_narrow_takes, bind=_bind_narrow, scratch=lambda p: 0)
TALL = Path(name="tall", takes=_tall_takes, bind=_bind_tall, scratch=_tall_scratch)
