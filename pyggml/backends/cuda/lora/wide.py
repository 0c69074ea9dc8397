"""Wide rows: a float32 matrix rounded to bfloat16, and beside it its product with thin factors.

Both need every number once, so one kernel reads the matrix once. The matrix may be a formula of
others (operands.py), which then never exists in float32. A block takes 16 rows, and its warps share
their columns; where rows are few, so do several blocks. Columns are multiplied in another order
than they lie in, the same for both factors: so a lane's eight numbers are neighbours.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda import ptx
from pyggml.backends.cuda.driver import cuda, device, kernel
from pyggml.backends.cuda.kernel import Compute, Kernel, Site
from pyggml.backends.cuda.launch import in_turn, launch, per_element
from pyggml.backends.cuda.lora.operands import (
    Types,
    formula_of,
    in_words,
    loader_of,
    three,
    types_of,
)
from pyggml.backends.cuda.ptx import bf16_bits
from pyggml.call import Call
from pyggml.dtypes import F32
from pyggml.sizes import round_up
from pyggml.tensors import Tensor

ROWS = 16  # of a block
MOST_COLUMNS = 192  # further ones: sums of a block in shared memory
TILE = 8  # columns of a tensor core's result
COLUMNS = 32  # of x, eight to a lane
_STEPS = 2  # of 32 numbers, whose loads are under way at the same time
_BLOCKS = 2112  # that fill a large card several times: the last ones to end cost little
_LINE = 64


def columns(rank: int) -> int:
    """Columns of a thin factor, which are zeros from `rank` on."""
    return round_up(rank, TILE)


@kernel
def _place(out, x, n_rows, n, first, rank, out_steps, x_steps, scale):
    """out (n_rows, n) = scale · x (n_rows, rank) from column `first` on, zeros beside, in BF16."""
    for e in range(cuda.grid(1), n_rows * n, cuda.gridsize(1)):
        i, j = e // n, e % n
        inside = first <= j and j < first + rank
        number = x[i * x_steps[0] + (j - first) * x_steps[1]] if inside else np.float32(0)
        out[i * out_steps[0] + j * out_steps[1]] = bf16_bits(scale * number)


def placed(
    out: Any, x: Any, sizes: tuple[int, int, int, int], out_steps: tuple[int, int],
    x_steps: tuple[int, int], stream: Any, scale: float = 1.0,
) -> Call:  # fmt: skip
    """A call of `_place`; sizes: n_rows, n, first, rank."""
    n = sizes[0] * sizes[1]
    return per_element(_place, n, stream, out, x, *sizes, out_steps, x_steps, np.float32(scale))


@device
def hold(words, i, half, w, inside):
    """words[i] = a lane's eight numbers of row g or, `half` 1, g + 8, as the left factors of two
    multiply_tile; zeros where not `inside`."""
    words[i, half] = w[0] & inside
    words[i, 2 + half] = w[1] & inside
    words[i, 4 + half] = w[2] & inside
    words[i, 6 + half] = w[3] & inside


@device
def put_held(out, at, words, i, half):
    """out[at …] = the eight numbers."""
    ptx.store_words(
        out, 2 * at, words[i, half], words[i, 2 + half], words[i, 4 + half], words[i, 6 + half]
    )


@device
def add_tiles(sums, words, i, factor, n_tiles, k, column):
    """sums (n_tiles, 4) += 32 columns of the held rows · factor (8·n_tiles, k)ᵀ."""
    group = (cuda.threadIdx.x & 31) >> 2
    left = words[i, 0], words[i, 1], words[i, 2], words[i, 3]
    more = words[i, 4], words[i, 5], words[i, 6], words[i, 7]
    for tile in range(n_tiles):
        b = ptx.load_words(factor, 2 * (np.int64(tile * TILE + group) * k + column))
        of = (sums[tile, 0], sums[tile, 1], sums[tile, 2], sums[tile, 3])
        of = ptx.multiply_tile(of, left, b[0], b[1])
        of = ptx.multiply_tile(of, more, b[2], b[3])
        sums[tile, 0], sums[tile, 1], sums[tile, 2], sums[tile, 3] = of


@device
def clear_tiles(sums, n_tiles):
    for tile in range(n_tiles):
        for e in range(4):
            sums[tile, e] = np.float32(0)


@device
def total_tiles(products, parts, sums, n_tiles, n_warps, first, m):
    """products (blocks that share rows, m, n) = the sums of all warps; parts (n_warps, 16·n) is in
    shared memory."""
    lane, warp, n = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5, n_tiles * TILE
    for tile in range(n_tiles):
        for e in range(4):
            row, column = (lane >> 2) + 8 * (e >> 1), tile * TILE + 2 * (lane & 3) + (e & 1)
            parts[warp, row * n + column] = sums[tile, e]
    cuda.syncthreads()
    for e in range(cuda.threadIdx.x, ROWS * n, cuda.blockDim.x):
        total = np.float32(0)
        for other in range(n_warps):
            total += parts[other, e]
        if first + e // n < m:
            products[cuda.blockIdx.y * m * n + first * n + e] = total


@cache
def _kernel(n_tiles: int, n_warps: int, formula: str, types: Types) -> Any:
    load = loader_of(formula, types)
    n, width = n_tiles * TILE, COLUMNS * _STEPS
    of_parts, of_sums, of_words = (n_warps, ROWS * n), (n_tiles, 4), (_STEPS, 8)

    @kernel
    def widen(out, products, x, y, z, factor, m, k):
        parts = cuda.shared.array(of_parts, np.float32)
        sums = cuda.local.array(of_sums, np.float32)
        words = cuda.local.array(of_words, np.uint32)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        group, mine = lane >> 2, 8 * (lane & 3)
        first = np.int64(cuda.blockIdx.x) * ROWS
        clear_tiles(sums, n_tiles)
        begin, apart = cuda.blockIdx.y * n_warps + warp, cuda.gridDim.y * n_warps
        for start in range(width * begin, k, width * apart):
            for step in range(_STEPS):  # without branches, so that all loads come first
                column = min(start + COLUMNS * step + mine, k - 8)
                is_inside = start + COLUMNS * step + mine < k
                inside = np.uint32(0xFFFFFFFF) if is_inside else np.uint32(0)
                for half in range(2):
                    row = min(first + group + 8 * half, m - 1)
                    hold(words, step, half, in_words(load(x, y, z, row * k + column)), inside)
            for step in range(_STEPS):
                column = min(start + COLUMNS * step + mine, k - 8)
                add_tiles(sums, words, step, factor, n_tiles, k, column)
            for step in range(_STEPS):
                column = start + COLUMNS * step + mine
                for half in range(2):
                    row = first + group + 8 * half
                    if row < m and column < k:
                        put_held(out, row * (k + n) + column, words, step, half)
        total_tiles(products, parts, sums, n_tiles, n_warps, first, m)

    return widen


@kernel
def _add_up(out, kept, products, m, n, k, n_parts, keeps):
    """The further columns of out (m, k + n) from the products of all blocks; kept is a copy."""
    for e in range(cuda.grid(1), m * n, cuda.gridsize(1)):
        total = np.float32(0)
        for part in range(n_parts):
            total += products[part * m * n + e]
        out[e // n * (k + n) + k + e % n] = bf16_bits(total)
        if keeps:
            kept[e] = bf16_bits(total)


def added_up(
    out: Any, products: Any, sizes: tuple[int, int, int, int], stream: Any, kept: Any = None
) -> Call:
    """A call of `_add_up`; sizes: m, n, k, n_parts."""
    copy, keeps = (out, False) if kept is None else (kept, True)
    return per_element(_add_up, sizes[0] * sizes[1], stream, out, copy, products, *sizes, keeps)


def _columns_of(node: Tensor) -> int:
    return node.shape[1] - node.src[0].shape[1]


def n_warps(n: int) -> int:
    """Warps of a block whose rows get n further columns."""
    return 8 if n <= MOST_COLUMNS // 2 else 4


def n_parts(m: int, n: int, k: int) -> int:
    """Blocks that share the columns of 16 rows."""
    most = -(-k // (COLUMNS * _STEPS * n_warps(n)))
    return max(1, min(most, _BLOCKS // -(-m // ROWS)))


def _parts(node: Tensor) -> tuple[int, int]:
    """Bytes of all thin factors in bfloat16 (columns, K), and of the products of all blocks."""
    (m, k), n = node.src[0].shape, _columns_of(node)
    return round_up(2 * n * k, _LINE), F32.block_bytes * n_parts(m, n, k) * m * n


def _scratch(node: Tensor, compute: Compute) -> int:
    return sum(_parts(node))


def _bind(site: Site, factors_in_rows: bool) -> Call:
    """factors_in_rows: whether a thin factor is (r, K), not (K, r)."""
    (m, k), n, at = site.node.src[0].shape, _columns_of(site.node), 0
    stacked, calls = site.scratch[: 2 * n * k].view(np.uint16), []
    scales = site.node.params["scales"]
    n_operands = len(site.src) - len(scales)
    sources = zip(site.src[n_operands:], site.node.src[n_operands:], scales, strict=True)
    for factor, t, scale in sources:
        rank = t.shape[0] if factors_in_rows else t.shape[1]
        steps = (1, k) if factors_in_rows else (rank, 1)
        sizes, to = (k, columns(rank), 0, rank), stacked[at * k : (at + columns(rank)) * k]
        calls.append(placed(to, factor, sizes, (1, k), steps, site.stream, scale))
        at += columns(rank)
    kind = formula_of(site.node), types_of(site.node.src[:n_operands])
    products = site.scratch[_parts(site.node)[0] :].view(np.float32)
    warps, parts = n_warps(n), n_parts(m, n, k)
    grid, run = (-(-m // ROWS), parts), _kernel(n // TILE, warps, *kind)
    of = site.out, products, *three(site.src[:n_operands]), stacked, m, k
    calls.append(launch(run, grid, 32 * warps, site.stream, *of))
    kept = site.saved[0] if site.saved else None
    return in_turn(*calls, added_up(site.out, products, (m, n, k, parts), site.stream, kept))


OF_ROWS = Kernel(lambda site: _bind(site, True), scratch=_scratch)
OF_GRADIENT = Kernel(lambda site: _bind(site, False), scratch=_scratch)
