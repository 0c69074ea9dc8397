"""The tiles of attention that its forward and backward pass share; see pyggml.gemm.flash.

A side, which the microkernel reads in vectors, is copied with zeros around it: as rows, and as
columns in panels. With `pairs` its slots hold two bfloat16: two rows of a number, or two numbers of
a row. The other side comes in groups of MR rows, packed when they are needed.
"""

from __future__ import annotations

import numpy as np

from pyggml._jit import kernel
from pyggml._simd import fill
from pyggml.gemm.panels import (
    LANES,
    MR,
    PADDED_MR,
    PAIRED,
    PANEL,
    interleave,
    pair_product,
    round_numbers,
    round_row,
    round_two,
    slots,
    tile_product,
    transpose,
)

BLOCK = 64  # keys (or queries) that one step of the inner loop takes; a multiple of every panel
TILE = PADDED_MR * BLOCK  # numbers of one tile of scores; rows from MR on are never read as such
ZERO = np.float32(0)
NOTHING = np.float32(1e30)  # lse of a query that sees no key: e^(z − lse) is 0


def padded(n: int, to: int) -> int:
    """n rounded up to a multiple of `to`."""
    return -(-n // to) * to


def _depth(d: int, pairs: bool) -> int:
    """Slots of D numbers, in whole vectors."""
    return slots(d, True) if pairs else padded(d, LANES)


Shape3 = tuple[int, int, int]


def rows_shape(n_heads: int, n: int, d: int, pairs: bool) -> Shape3:
    """Shape of the copy by rows of an (n, n_heads, d) array."""
    long = padded(n, BLOCK)
    return n_heads, long // 2 if pairs else long, padded(d, PANEL)


def columns_shape(n_heads: int, n: int, d: int, pairs: bool) -> Shape3:
    """Shape of the copy by columns of an (n, n_heads, d) array."""
    return n_heads, padded(n, BLOCK) // PANEL, _depth(d, pairs) * PANEL


def scratch_floats(d: int) -> int:
    """Floats one thread needs: two packed groups, tiles, two sums, and what packing wants."""
    deep, wide = padded(d, PAIRED), padded(d, PANEL)
    groups = 2 * (MR * deep + LANES)
    tiles = 2 * TILE + TILE // 2 + MR * BLOCK + LANES
    return groups + tiles + MR * (2 * wide + 2) + PADDED_MR * deep + 2 * wide + PAIRED


@kernel
def cut(memory, n):
    """The first n floats, and the rest."""
    return memory[:n], memory[n:]


@kernel
def _copy_row(row, x, t, head, used):
    """row = one head of x at t, or zeros from `used` on; zeros after its D numbers."""
    d = x.shape[2] if t < used else 0
    for i in range(d):
        row[i] = x[t, head, i]
    fill(row[d:], ZERO)


@kernel
def _load_rows(rows, x, first, head, used, deep, pairs, spare):
    """Rows first … of one head of x as slots, `deep` to a row; zeros from row `used` on."""
    for i in range(rows.shape[0] // deep):
        row = rows[i * deep : (i + 1) * deep]
        if pairs and first + i < used:
            round_numbers(row, x[first + i, head], spare)
        else:
            _copy_row(row, x, first + i, head, used)


@kernel
def pack_columns(columns, x, head, used, pairs, scratch):
    """The first `used` rows of one head of x (T, H, D), and zeros up to the next whole block."""
    deep = columns.shape[1] // PANEL
    block, spare = cut(scratch, LANES * deep)
    for t in range(0, (used + BLOCK - 1) // BLOCK * BLOCK, LANES):
        _load_rows(block, x, t, head, used, deep, pairs, spare)
        to = columns[t // PANEL].ctypes.data + t % PANEL * 4
        for j in range(0, deep, LANES):
            transpose(to + j * PANEL * 4, PANEL, block.ctypes.data + j * 4, deep)


@kernel
def pack_rows(rows, x, head, used, pairs, scratch):
    """The same by rows; with `pairs` two rows share one."""
    end, wide = (used + BLOCK - 1) // BLOCK * BLOCK, rows.shape[1]
    if not pairs:
        for t in range(end):
            _copy_row(rows[t], x, t, head, used)
        return
    one, other = scratch[:wide], scratch[wide : 2 * wide]
    for t in range(0, end, 2):
        _copy_row(one, x, t, head, used)
        _copy_row(other, x, t + 1, head, used)
        round_two(rows[t // 2].ctypes.data, one.ctypes.data, other.ctypes.data, wide)


@kernel
def pack_group(packed, x, first, head, deep, pairs, scratch):
    """Rows first … first + MR of one head as (deep, MR); rows past the end are zero.

    LANES slots after the group are overwritten.
    """
    rows, spare = cut(scratch, PADDED_MR * deep)
    _load_rows(rows, x, first, head, min(first + MR, x.shape[0]), deep, pairs, spare)
    interleave(packed.ctypes.data, rows.ctypes.data, deep, deep)


@kernel
def products(tile, packed, columns, first, pairs):
    """tile (MR, BLOCK) = packed rows · columns first … first + BLOCK."""
    deep = columns.shape[1] // PANEL
    for j in range(0, BLOCK, PANEL):
        b = columns[(first + j) // PANEL].ctypes.data
        to = tile.ctypes.data + j * 4
        if pairs:
            pair_product(packed.ctypes.data, b, PANEL, to, BLOCK, deep, 0)
        else:
            tile_product(packed.ctypes.data, b, PANEL, to, BLOCK, deep, 0)


@kernel
def add_weighted(total, tile, rows, first, pairs, scratch):
    """total (MR, wide) += tile (MR, BLOCK) · rows[first : first + BLOCK]."""
    wide = rows.shape[1]
    weights, half = cut(scratch, MR * BLOCK + LANES)
    to = weights.ctypes.data
    if pairs:
        for i in range(MR):
            here = half.ctypes.data + i * BLOCK // 2 * 4
            round_row(here, tile.ctypes.data + i * BLOCK * 4, BLOCK)
        interleave(to, half.ctypes.data, BLOCK // 2, BLOCK // 2)
        for j in range(0, wide, PANEL):
            b, c = rows.ctypes.data + (first // 2 * wide + j) * 4, total.ctypes.data + j * 4
            pair_product(to, b, wide, c, wide, BLOCK // 2, 1)
        return
    interleave(to, tile.ctypes.data, BLOCK, BLOCK)
    for j in range(0, wide, PANEL):
        b, c = rows.ctypes.data + (first * wide + j) * 4, total.ctypes.data + j * 4
        tile_product(to, b, wide, c, wide, BLOCK, 1)


@kernel
def write_group(out, total, first, head, factors):
    """out[first + i, head] = total[i] · factors[i]."""
    n_rows, _, d = out.shape
    wide = total.shape[0] // MR
    for i in range(min(MR, n_rows - first)):
        of, to, factor = total[i * wide :], out[first + i, head], factors[i]
        for j in range(d):
            to[j] = of[j] * factor


@kernel
def hull(span, first, n):
    """The smallest range that holds the ranges of n queries."""
    low, high = span[first, 0], span[first, 1]
    for i in range(first + 1, first + n):
        low, high = min(low, span[i, 0]), max(high, span[i, 1])
    return low, high
