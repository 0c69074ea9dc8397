"""Few rows of A, as in generation: each row of W is read once, packed, by the lanes of a warp.

A lane unpacks every 32nd weight of a row (of types with blocks of 32, and of float32 that lies in
fours, every 32nd four), and multiplies them with all rows of A.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.fours import load_four, vectorizable
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.warp import LANES, warp_sum
from pyggml.backends.cuda.gemm.problem import CudaOperands, CudaProblem, CudaProductPath
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.launches import launch
from pyggml.backends.cuda.runtime.simulator import HAS_PTX, small
from pyggml.backends.cuda.weights.readers import four_of, weight_of
from pyggml.graph.call import Call
from pyggml.graph.dtypes import DTYPES, F32
from pyggml.quants.layout import GROUP

_FEW_ROWS, _MOST_ROWS = 2, 8  # of A: where cuBLAS takes longer, and where it may be absent
WARPS = small(4)  # of a block
_FEW_COLUMNS = 528  # of C: a block for each, up to four of them on a multiprocessor of a large card


@cache
def _adder(name: str, rows: int, vectorized: bool) -> tuple[int, Any]:
    """(weights at a time, add(sums, a, b, m, k, at, j, i)): sums[t] += A[t, i …] · weights j … of
    the block at byte `at`."""
    if vectorized:
        return 4, _adder_of_fours(rows)
    if DTYPES[name].block != GROUP:
        weight = weight_of(name)

        @device
        def add(sums, a, b, m, k, at, j, i):
            w = weight(b, at, j)
            for t in range(rows):
                if t < m:
                    sums[t] += w * a[t * k + i]

        return 1, add
    four = four_of(name)

    @device
    def add_four(sums, a, b, m, k, at, j, i):
        w, x, y, z = four(b, at, j)
        for t in range(rows):
            if t < m:
                of = t * k + i
                sums[t] += w * a[of] + x * a[of + 1] + y * a[of + 2] + z * a[of + 3]

    return 4, add_four


def _adder_of_fours(rows: int) -> Any:
    """Of float32, where A and B lie as load_four wants them."""

    @device
    def add_four(sums, a, b, m, k, at, j, i):
        w, x, y, z = load_four(b, at >> 2)
        for t in range(rows):
            if t < m:
                p, q, r, s = load_four(a, t * k + i)
                sums[t] += (w * p + x * q) + (y * r + z * s)

    return add_four


@cache
def _kernel(name: str, rows: int, vectorized: bool) -> Any:
    step, add = _adder(name, rows, vectorized)
    block, block_bytes = DTYPES[name].block, DTYPES[name].block_bytes

    @kernel
    def multiply(c, a, b, m, n, k, accumulate):
        sums = cuda.local.array(rows, np.float32)
        lane, warp = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        row_bytes, warps = k // block * block_bytes, cuda.blockDim.x // LANES
        for column in range(cuda.blockIdx.x * warps + warp, n, cuda.gridDim.x * warps):
            for t in range(rows):
                sums[t] = 0
            start = column * row_bytes
            for i in range(step * lane, k, step * LANES):
                add(sums, a, b, m, k, start + i // block * block_bytes, i % block, i)
            for t in range(rows):
                total = warp_sum(sums[t])
                if lane == 0 and t < m:
                    at = t * n + column
                    c[at] = c[at] + total if accumulate else total

    return multiply


def _takes(p: CudaProblem) -> bool:
    return p.m <= _MOST_ROWS and p.a_is_whole and p.b_in_rows and (p.n == 1 or p.b.row == p.k)


def _bind(p: CudaProblem, o: CudaOperands) -> Call:
    rows = next(n for n in (1, 2, 4, 8) if n >= p.m)
    in_fours = HAS_PTX and p.b.dtype is F32 and p.k % 4 == 0 and vectorizable(o.a, o.b)
    run = _kernel(p.b.dtype.name, rows, in_fours)
    warps = 1 if p.n <= _FEW_COLUMNS else WARPS
    grid = min(-(-p.n // warps), small(1 << 20))
    return launch(
        run, grid, warps * LANES, o.stream, o.c, o.a, o.b.view(np.uint8), p.m, p.n, p.k,
        o.accumulate,
    )  # fmt: skip


DOTS = CudaProductPath(name="dots", takes=_takes, bind=_bind, scratch=lambda p: 0)
DOTS_OF_FEW = replace(DOTS, name="dots of few", takes=lambda p: p.m <= _FEW_ROWS and _takes(p))
