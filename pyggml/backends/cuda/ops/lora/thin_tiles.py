"""Products of rows with thin factors on tensor cores: factors as tiles, a lane's words of the rows,
and a warp's sums."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.fours import load_four
from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.runtime.driver import cuda

ROWS = 16  # that a warp multiplies at once
TILE_COLUMNS = 8  # that a tensor core makes at once


class Tiles(NamedTuple):
    """Thin factors (r, K), 8 rows after 8 rows: where they begin, how many rows are left, and what
    each of their numbers is multiplied with."""

    arrays: tuple[Any, ...]
    ranks: tuple[int, ...]
    scales: tuple[Any, ...]
    steps: tuple[int, int]  # from row to row, and from number to number


def tiles_of(
    factors: Sequence[Any], ranks: Sequence[int], scales: Sequence[float], steps: tuple[int, int]
) -> Tiles:
    tiles = [
        (factor[first * steps[0] :], rank - first, np.float32(scale))
        for factor, rank, scale in zip(factors, ranks, scales, strict=True)
        for first in range(0, rank, TILE_COLUMNS)
    ]
    arrays, left, of_each = zip(*tiles, strict=True)
    return Tiles(arrays, left, of_each, steps)


@device
def _from_rows(factor, i, column, steps, scale):
    """Numbers `column` … of row i, times scale, as four words of bfloat16."""
    a, b, c, d = load_four(factor, i * steps[0] + column)
    e, f, g, h = load_four(factor, i * steps[0] + column + 4)
    return (
        ptx.two_bf16(scale * a, scale * b), ptx.two_bf16(scale * c, scale * d),
        ptx.two_bf16(scale * e, scale * f), ptx.two_bf16(scale * g, scale * h),
    )  # fmt: skip


@device
def from_columns(factor, i, column, steps, scale):
    """The same where a row's numbers lie apart."""
    at, apart = i * steps[0] + column * steps[1], steps[1]
    return (
        ptx.two_bf16(scale * factor[at], scale * factor[at + apart]),
        ptx.two_bf16(scale * factor[at + 2 * apart], scale * factor[at + 3 * apart]),
        ptx.two_bf16(scale * factor[at + 4 * apart], scale * factor[at + 5 * apart]),
        ptx.two_bf16(scale * factor[at + 6 * apart], scale * factor[at + 7 * apart]),
    )


@device
def hold(words, i, half, w, inside):
    """words[i] = a lane's eight numbers of row g or, `half` 1, g + 8, as the left factors of two
    ptx.add_tile; zeros where not `inside`."""
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


@cache
def adder(in_rows: bool, groups: int) -> Any:
    """add(sums, words, i, tiles, n_tiles, column): sums (groups · n_tiles, 4) += 32 columns of the
    held rows, from words[i · groups] on, times those of the factors, transposed.

    in_rows: whether a factor's rows are whole in memory; groups: of 16 rows
    """
    load = _from_rows if in_rows else from_columns

    @device
    def add_tiles(sums, words, i, tiles, n_tiles, column):
        group = (cuda.threadIdx.x & 31) >> 2
        for tile in range(n_tiles):
            rank = tiles.ranks[tile]
            scale = tiles.scales[tile] if group < rank else ZERO
            b = load(tiles.arrays[tile], min(group, rank - 1), column, tiles.steps, scale)
            for g in range(groups):
                j, at = i * groups + g, g * n_tiles + tile
                left = words[j, 0], words[j, 1], words[j, 2], words[j, 3]
                more = words[j, 4], words[j, 5], words[j, 6], words[j, 7]
                ptx.add_tile(sums, at, left, b[0], b[1])
                ptx.add_tile(sums, at, more, b[2], b[3])

    return add_tiles


@device
def clear_tiles(sums, n_tiles):
    for tile in range(n_tiles):
        for e in range(4):
            sums[tile, e] = ZERO


@device
def put_tiles(parts, sums, n_tiles, groups, begin, n):
    """parts (warps, 16·groups·n), in shared memory, from column `begin` on = each warp's sums."""
    lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
    for g in range(groups):
        for tile in range(n_tiles):
            for e in range(4):
                row = ROWS * g + (lane >> 2) + 8 * (e >> 1)
                column = begin + tile * TILE_COLUMNS + 2 * (lane & 3) + (e & 1)
                parts[warp, row * n + column] = sums[g * n_tiles + tile, e]
