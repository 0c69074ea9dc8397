"""Our own product on tensor cores, of factors in bfloat16 with float32 sums.

A block makes a tile of 128 × 128 of C, each of its eight warps 64 × 32. Tiles of A and B, 32 deep,
are copied to shared memory two steps ahead, in three places. The 16-byte chunks of a row are
exchanged by the row's number, so that eight rows of a column lie in different banks.
"""

from functools import cache, partial
from typing import Any

import numpy as np

from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.gemm import slices
from pyggml.backends.cuda.gemm.problem import CudaProblem, CudaProductPath
from pyggml.backends.cuda.gemm.slices import Form
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.launches import launch
from pyggml.graph.call import Call

TILE, DEPTH, THREADS = 128, 32, 256
_TILE_BYTES = 2 * TILE * DEPTH
_PLACES = 3
_SHARED_BYTES = 2 * _TILE_BYTES * _PLACES


@device
def _near(row, chunk):
    """The byte of a chunk of 8 numbers in a tile (128, 32)."""
    return row * 2 * DEPTH + ((chunk ^ ((row >> 1) & 3)) << 4)


@device
def _far(row, chunk):
    """The byte of a chunk of 8 numbers in a tile (32, 128)."""
    return row * 2 * TILE + ((chunk ^ (row & 7)) << 4)


@device
def _copy_near(tile, at, x, first, k, n, depth, step):
    """Rows first … of x (n, depth), numbers k … of each; zeros outside."""
    for e in range(cuda.threadIdx.x, TILE * DEPTH // 8, THREADS):
        row, chunk = e >> 2, e & 3
        left = depth - k - 8 * chunk if first + row < n else 0
        n_bytes = np.int32(2 * max(0, min(8, left)))
        source = 2 * (np.int64(first + row) * step + k + 8 * chunk) if n_bytes > 0 else 0
        ptx.copy_16(tile, at + _near(row, chunk), x, source, n_bytes)


@device
def _copy_far(tile, at, x, first, k, n, depth, step):
    """Rows k … of x (depth, n), numbers first … of each; zeros outside."""
    for e in range(cuda.threadIdx.x, TILE * DEPTH // 8, THREADS):
        row, chunk = e >> 4, e & 15
        left = n - first - 8 * chunk if k + row < depth else 0
        n_bytes = np.int32(2 * max(0, min(8, left)))
        source = 2 * (np.int64(k + row) * step + first + 8 * chunk) if n_bytes > 0 else 0
        ptx.copy_16(tile, at + _far(row, chunk), x, source, n_bytes)


@device
def _read_near(tile, at, first, k):
    lane = cuda.threadIdx.x & 31
    row = first + (lane & 7) + ((lane >> 4) << 3)
    return ptx.load_matrices(tile, at + _near(row, 2 * k + ((lane >> 3) & 1)))


@device
def _read_far(tile, at, first, k):
    lane = cuda.threadIdx.x & 31
    place = _far(16 * k + (lane & 15), (first >> 3) + (lane >> 4))
    return ptx.load_matrices_transposed(tile, at + place)


@device
def _write(c, sums, first_m, first_n, m, n, step, accumulate):
    lane = cuda.threadIdx.x & 31
    for i in range(16):
        for e in range(4):
            row = first_m + (i >> 2) * 16 + (lane >> 2) + 8 * (e >> 1)
            column = first_n + (i & 3) * 8 + ((lane & 3) << 1) + (e & 1)
            if row < m and column < n:
                at = np.int64(row) * step + column
                c[at] = c[at] + sums[i, e] if accumulate else sums[i, e]


@cache
def _kernel(near_k: bool) -> Any:
    copy, read = (_copy_near, _read_near) if near_k else (_copy_far, _read_far)

    @device
    def multiply(sums, tile, at, row, column):
        """sums += A · B of the warp, 32 deep."""
        lane = cuda.threadIdx.x & 31
        for k in range(DEPTH // 16):
            b = read(tile, at + _TILE_BYTES, column, k)
            d = read(tile, at + _TILE_BYTES, column + 16, k)
            for i in range(4):
                place = _near(row + 16 * i + (lane & 15), 2 * k + (lane >> 4))
                a = ptx.load_matrices(tile, at + place)
                ptx.add_tile(sums, 4 * i, a, b[0], b[1])
                ptx.add_tile(sums, 4 * i + 1, a, b[2], b[3])
                ptx.add_tile(sums, 4 * i + 2, a, d[0], d[1])
                ptx.add_tile(sums, 4 * i + 3, a, d[2], d[3])

    @kernel
    def product(c, a, b, m, n, k, a_step, b_step, c_step, accumulate):
        tile = cuda.shared.array(_SHARED_BYTES, np.uint8, 128)
        sums = cuda.local.array((16, 4), np.float32)
        warp = cuda.threadIdx.x >> 5
        row, column = (warp & 1) * 64, (warp >> 1) * 32
        first_m, first_n = cuda.blockIdx.x * TILE, cuda.blockIdx.y * TILE
        for i in range(16):
            for e in range(4):
                sums[i, e] = np.float32(0)
        for step in range(_PLACES - 1):
            at = step * 2 * _TILE_BYTES
            _copy_near(tile, at, a, first_m, step * DEPTH, m, k, a_step)
            copy(tile, at + _TILE_BYTES, b, first_n, step * DEPTH, n, k, b_step)
            ptx.commit_copies()
        for step in range((k + DEPTH - 1) // DEPTH):
            ptx.await_all_but_one()
            cuda.syncthreads()
            ahead = step + _PLACES - 1
            at = ahead % _PLACES * 2 * _TILE_BYTES
            _copy_near(tile, at, a, first_m, ahead * DEPTH, m, k, a_step)
            copy(tile, at + _TILE_BYTES, b, first_n, ahead * DEPTH, n, k, b_step)
            ptx.commit_copies()
            multiply(sums, tile, step % _PLACES * 2 * _TILE_BYTES, row, column)
        ptx.await_copies()
        _write(c, sums, first_m + row, first_n + column, m, n, c_step, accumulate)

    return product


def _multiply(
    stream: Any, sizes: tuple[int, int, int], a: Any, a_form: Form, b: Any, b_form: Form,
    c: Any, c_step: int, accumulate: bool,
) -> Call:  # fmt: skip
    m, n, _ = sizes
    grid = -(-m // TILE), -(-n // TILE)
    run = _kernel(b_form[0])
    return launch(
        run, grid, THREADS, stream, c, a, b, *sizes, a_form[1], b_form[1], c_step, accumulate
    )


def _takes(p: CudaProblem) -> bool:
    """Rows of both factors begin at multiples of 16 bytes."""
    row = p.k if p.b_in_rows else p.n
    lies_well = p.a_is_whole and slices.takes(p) and p.k % 8 == row % 8 == 0
    return ptx.TENSOR_CORES and p.rounds and lies_well


TENSOR = CudaProductPath(
    name="tensor", takes=_takes, bind=partial(slices.bind, multiply=_multiply),
    scratch=slices.scratch, shares=True,
)  # fmt: skip
