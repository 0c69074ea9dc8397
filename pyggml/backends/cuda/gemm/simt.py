"""Any product, in float32: a block of threads makes a tile of C from tiles of A and B in shared
memory, each weight unpacked as it is read. It is the reference of the other paths."""

from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.gemm.problem import CudaOperands, CudaProblem, CudaProductPath
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.launches import launch
from pyggml.backends.cuda.runtime.simulator import small
from pyggml.backends.cuda.weights.readers import weight_of
from pyggml.graph.call import Call
from pyggml.graph.dtypes import DTYPES, F32

SIDE = small(16)  # threads along each side of a block
EACH = small(4)  # rows, and columns, of C of one thread
TILE = SIDE * EACH
DEPTH = 16  # numbers along k in shared memory
_SHAPE = (DEPTH, TILE + 1)  # of a tile there; a column more keeps threads in banks of their own
_MOST_BLOCKS = 65535  # along the second and third axis of a grid


@device
def start_of(z, batches, repeats, steps):
    """The first element of the batch of a factor that batch z of C takes."""
    outer, inner = z // batches[1], z % batches[1]
    return outer // repeats[0] * steps[0] + inner // repeats[1] * steps[1]


@cache
def _loader(name: str, in_rows: bool) -> Any:
    """load(b, start, n, k, steps): B[n, k] as float32."""
    if name == F32.name:

        @device
        def load(b, start, n, k, steps):
            return b[start + n * steps[2] + k * steps[3]]

        return load
    weight = weight_of(name)
    block, block_bytes = DTYPES[name].block, DTYPES[name].block_bytes

    @device
    def load_packed(b, start, n, k, steps):
        row, i = (n, k) if in_rows else (k, n)
        step = steps[2] if in_rows else steps[3]
        number = start + row * step + i
        return weight(b, number // block * block_bytes, number % block)

    return load_packed


@cache
def _filler(name: str, in_rows: bool) -> Any:
    load = _loader(name, in_rows)

    @device
    def fill(left, right, a, b, starts, firsts, sizes, a_steps, b_steps):
        """A[first row …, first k …] and B's likewise, 0 outside, by all threads."""
        thread = cuda.threadIdx.y * SIDE + cuda.threadIdx.x
        for e in range(thread, DEPTH * TILE, SIDE * SIDE):
            i, j = (e // DEPTH, e % DEPTH) if a_steps[3] == 1 else (e % TILE, e // TILE)
            row, k = firsts[0] + i, firsts[2] + j
            inside = row < sizes[0] and k < sizes[2]
            at = starts[0] + row * a_steps[2] + k * a_steps[3]
            left[j, i] = a[at] if inside else np.float32(0)
        for e in range(thread, DEPTH * TILE, SIDE * SIDE):
            i, j = (e // DEPTH, e % DEPTH) if b_steps[3] == 1 else (e % TILE, e // TILE)
            n, k = firsts[1] + i, firsts[2] + j
            inside = n < sizes[1] and k < sizes[2]
            right[j, i] = load(b, starts[1], n, k, b_steps) if inside else np.float32(0)

    return fill


@cache
def _kernel(name: str, in_rows: bool) -> Any:
    fill = _filler(name, in_rows)

    @kernel
    def multiply(c, a, b, sizes, batches, repeats, a_steps, b_steps, accumulate):
        left = cuda.shared.array(_SHAPE, np.float32)
        right = cuda.shared.array(_SHAPE, np.float32)
        sums = cuda.local.array((EACH, EACH), np.float32)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        m, n, depth = sizes
        first_n = cuda.blockIdx.x * TILE
        n_tiles = (m + TILE - 1) // TILE
        for z in range(cuda.blockIdx.z, batches[0] * batches[1], cuda.gridDim.z):
            a_start = start_of(z, batches, repeats[:2], a_steps)
            b_start = start_of(z, batches, repeats[2:], b_steps)
            for tile in range(cuda.blockIdx.y, n_tiles, cuda.gridDim.y):
                first_m = tile * TILE
                for i in range(EACH):
                    for j in range(EACH):
                        sums[i, j] = 0
                for k in range(0, depth, DEPTH):
                    starts, firsts = (a_start, b_start), (first_m, first_n, k)
                    fill(left, right, a, b, starts, firsts, sizes, a_steps, b_steps)
                    cuda.syncthreads()
                    for kk in range(DEPTH):
                        for i in range(EACH):
                            for j in range(EACH):
                                sums[i, j] += left[kk, y + i * SIDE] * right[kk, x + j * SIDE]
                    cuda.syncthreads()
                for i in range(EACH):
                    for j in range(EACH):
                        row, column = first_m + y + i * SIDE, first_n + x + j * SIDE
                        if row < m and column < n:
                            at = (z * m + row) * n + column
                            c[at] = c[at] + sums[i, j] if accumulate else sums[i, j]

    return multiply


def _bind(p: CudaProblem, o: CudaOperands) -> Call:
    run = _kernel(p.b.dtype.name, p.b_in_rows)
    tiles = -(-p.n // TILE), min(-(-p.m // TILE), _MOST_BLOCKS)
    grid = (*tiles, min(p.batches[0] * p.batches[1], _MOST_BLOCKS))
    b = o.b if p.b.dtype is F32 else o.b.view(np.uint8)
    return launch(
        run, grid, (SIDE, SIDE), o.stream, o.c, o.a, b, (p.m, p.n, p.k), p.batches, (*p.a.repeats,
        *p.b.repeats), p.a.steps, p.b.steps, o.accumulate,
    )  # fmt: skip


SIMT = CudaProductPath(name="simt", takes=lambda p: True, bind=_bind, scratch=lambda p: 0)
