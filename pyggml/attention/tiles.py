"""The tiles of attention that its forward and backward pass share; see pyggml.attention.flash.

A tile has QUERIES rows, PITCH floats apart, and BLOCK keys as columns. In a product the first side
lies as it is: the microkernel broadcasts its slots, from a tile's rows as well as from its columns.
The second side is copied into panels (depth, PANEL) with zeros around it: by columns, panels of
keys whose depth are the features, or by rows, panels of features whose depth are the keys (or
queries). With `pairs` a slot holds two bfloat16, neighbours along the depth.

`lows` and `highs` are the hulls of what groups of MR queries see: [low, high) of all keys.
"""

from __future__ import annotations

import numpy as np

from pyggml._isa import CHOSEN
from pyggml._jit import kernel
from pyggml._simd import fill
from pyggml.gemm.microkernel import make_strided_product
from pyggml.gemm.panels import (
    LANES,
    MR,
    PANEL,
    round_numbers,
    round_row,
    round_two,
    slots,
    transpose,
)


def padded(n: int, to: int) -> int:
    """n rounded up to a multiple of `to`."""
    return -(-n // to) * to


BLOCK = 128  # keys of a tile; a multiple of every panel
QUERIES = BLOCK // MR * MR
GROUPS = QUERIES // MR
PITCH = padded(padded(BLOCK, MR), LANES)  # room for whole groups of keys
TILE = QUERIES * PITCH
ZERO = np.float32(0)
MOST = 0x7FFFFFFF  # more keys than there are
# Numba would compile a function once for each value of a Python integer that it is called with.
START, NEXT, BELOW = np.int64(0), np.int64(1), np.int64(PITCH)
EXACT, NEW, ADDED = np.bool_(False), np.bool_(False), np.bool_(True)
NOTHING = np.float32(1e30)  # lse of a query that sees no key: e^(z − lse) is 0

_float_product = make_strided_product(MR, CHOSEN.nv, LANES, pairs=False)
_pair_product = make_strided_product(MR, CHOSEN.nv, LANES, pairs=True, bf16=CHOSEN.bf16)

# -- sizes --------------------------------------------------------------------------------------

Shape3 = tuple[int, int, int]


def deep_slots(d: int, pairs: bool) -> int:
    """Slots of D numbers, in whole vectors."""
    return slots(d, True) if pairs else padded(d, LANES)


def rows_shape(n_heads: int, n: int, d: int, pairs: bool) -> Shape3:
    """Shape of the copy by rows of an (n, n_heads, d) array: heads, panels, a panel."""
    long = padded(n, BLOCK)
    return n_heads, padded(d, PANEL) // PANEL, (long // 2 if pairs else long) * PANEL


def columns_shape(n_heads: int, n: int, d: int, pairs: bool) -> Shape3:
    """Shape of the copy by columns of an (n, n_heads, d) array: heads, panels, a panel."""
    return n_heads, padded(n, BLOCK) // PANEL, deep_slots(d, pairs) * PANEL


# -- copies -------------------------------------------------------------------------------------


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
def load_rows(rows, x, first, head, used, deep, pairs, spare):
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
        load_rows(block, x, t, head, used, deep, pairs, spare)
        to = columns[t // PANEL].ctypes.data + t % PANEL * 4
        for j in range(0, deep, LANES):
            transpose(to + j * PANEL * 4, PANEL, block.ctypes.data + j * 4, deep)


@kernel
def pack_rows(rows, x, first, n, head, used, pairs, scratch):
    """Rows first … first + n by rows, n even; zeros from row `used` on."""
    wide = rows.shape[0] * PANEL
    one, rest = cut(scratch, wide)
    other = rest[:wide]
    for t in range(0, n, 2):
        _copy_row(one, x, first + t, head, used)
        _copy_row(other, x, first + t + 1, head, used)
        for p in range(rows.shape[0]):
            here, of = rows[p], p * PANEL
            if pairs:
                to = here[t // 2 * PANEL :].ctypes.data
                round_two(to, one[of:].ctypes.data, other[of:].ctypes.data, PANEL)
                continue
            for j in range(PANEL):
                here[t * PANEL + j] = one[of + j]
                here[(t + 1) * PANEL + j] = other[of + j]


@kernel
def round_rows(to, tile, n):
    """n rows of a tile as pairs of keys, BLOCK / 2 slots to a row."""
    for i in range(n):
        round_row(to[i * (BLOCK // 2) :].ctypes.data, tile[i * PITCH :].ctypes.data, BLOCK)


@kernel
def round_columns(to, tile, n):
    """n rows of a tile as pairs of queries, two rows of a tile in one."""
    for i in range(0, n, 2):
        one, other = tile[i * PITCH :], tile[(i + 1) * PITCH :]
        round_two(to[i // 2 * PITCH :].ctypes.data, one.ctypes.data, other.ctypes.data, PITCH)


# -- products -----------------------------------------------------------------------------------


@kernel
def _multiply(a, row_step, step, b, c, pitch, depth, pairs, accumulate):
    """c (MR, PANEL) (+)= a · b, all addresses; a's steps from row to row and along the depth."""
    if pairs:
        _pair_product(a, row_step, step, b, PANEL, c, pitch, depth, accumulate)
    else:
        _float_product(a, row_step, step, b, PANEL, c, pitch, depth, accumulate)


@kernel
def scores(tile, rows, columns, first, lows, highs, pairs):
    """tile = rows · keys first … first + BLOCK, for the panels that a group sees any key of."""
    deep = columns.shape[1] // PANEL
    for j in range(0, BLOCK, PANEL):
        b = columns[(first + j) // PANEL].ctypes.data
        for g in range(lows.shape[0]):
            if lows[g] < first + j + PANEL and highs[g] > first + j:
                a, c = (
                    rows.ctypes.data + g * MR * deep * 4,
                    tile.ctypes.data + (g * MR * PITCH + j) * 4,
                )
                _multiply(a, deep, NEXT, b, c, BELOW, deep, pairs, NEW)


@kernel
def add_to_queries(total, weights, pitch, rows, first, lows, highs, pairs):
    """total (queries, wide) += weights · rows first …; the weights' rows lie pitch slots apart."""
    wide, share = rows.shape[0] * PANEL, 2 if pairs else 1
    for p in range(rows.shape[0]):
        for g in range(lows.shape[0]):
            start = max(lows[g] - first, 0) // share
            stop = (min(highs[g] - first, BLOCK) + share - 1) // share
            if start < stop:
                a = weights.ctypes.data + (g * MR * pitch + start) * 4
                b = rows[p].ctypes.data + (first // share + start) * PANEL * 4
                c = total.ctypes.data + (g * MR * wide + p * PANEL) * 4
                _multiply(a, pitch, NEXT, b, c, wide, stop - start, pairs, ADDED)


@kernel
def _seeing(lows, highs, start, stop):
    """The first group that sees any of the keys [start, stop), and the one past the last."""
    first, last = lows.shape[0], 0
    for g in range(lows.shape[0]):
        if lows[g] < stop and highs[g] > start:
            first, last = min(first, g), g + 1
    return first, last


@kernel
def add_to_keys(total, weights, rows, first, window, lows, highs, pairs):
    """total[first + window] (keys, wide) += weightsᵀ · rows, rows those of the tile's queries."""
    wide, share = rows.shape[0] * PANEL, 2 if pairs else 1
    for p in range(rows.shape[0]):
        for key in range(window[0], window[1], MR):
            start, stop = _seeing(lows, highs, first + key, first + key + MR)
            if start < stop:
                start, stop = start * MR // share, stop * MR // share
                a = weights.ctypes.data + (start * PITCH + key) * 4
                b = rows[p].ctypes.data + start * PANEL * 4
                c = total.ctypes.data + ((first + key) * wide + p * PANEL) * 4
                _multiply(a, NEXT, BELOW, b, c, wide, stop - start, pairs, ADDED)


# -- ranges -------------------------------------------------------------------------------------


@kernel
def hulls(lows, highs, span, first):
    """Fills lows and highs for groups of the queries from `first` on; returns the hull of all."""
    fill(lows, np.int32(MOST))
    fill(highs, np.int32(0))
    low, high = MOST, 0
    for g in range(lows.shape[0]):
        for i in range(first + g * MR, min(first + (g + 1) * MR, span.shape[0])):
            if span[i, 0] < span[i, 1]:
                lows[g], highs[g] = min(lows[g], span[i, 0]), max(highs[g], span[i, 1])
        low, high = min(low, lows[g]), max(high, highs[g])
    return low, high


@kernel
def seen(span, query, n, first):
    """What one of the first n queries sees of the keys first … first + BLOCK, from `first` on."""
    if query >= n:
        return 0, 0
    return max(span[query, 0] - first, 0), min(span[query, 1] - first, BLOCK)
