"""A tile of attention on Intel's tiles: sizes, how its operands are packed, its products.

A tile of scores has BR queries and BC keys; its queries come in groups of SIDE. Operands are
bfloat16 (pyggml.kernels.gemm.amx). The first one of a product lies in rows, the second in panels of
SIDE columns:

    in pairs     X:  columns are features, and k counts tokens
    transposed   Xᵀ: columns are tokens, and k counts features

Scores enter an exponential, which makes relative errors of absolute ones. So the forward pass
splits their operands: x = hi + lo, both bfloat16. Then q·k = hi·hi + lo·hi + hi·lo is one product
of three times as many features, with rows (hi, lo, hi) and columns (hi, hi, lo). It is off by
2^−16 of what is summed, not by 2^−8.
"""

import numpy as np

from pyggml.jit import kernel
from pyggml.jit.scratch import Array
from pyggml.jit.simd import fill
from pyggml.kernels.attention.softmax import BC, ZERO, groups_that_see
from pyggml.kernels.gemm.amx.rows import (
    LANES,
    LINE,
    panel_bytes,
    put_columns,
    put_pairs,
    round_padded,
    split_row,
    transpose,
)
from pyggml.kernels.gemm.amx.tiles import SIDE, STEP, TILE_BYTES, micro_product, rows_of
from pyggml.kernels.gemm.microkernel import fetch
from pyggml.sizes import round_up

BR = 128
LDS = BC + LINE // 4  # floats from row to row of scores
LDP = (BC + LINE // 2) // 2  # words from row to row of probabilities, pairs of keys
PARTS = 3  # of a split number
_AHEAD = 6  # rows that are fetched before they are read
NOTHING, HI = np.uint16(0), 0

# -- sizes ----------------------------------------------------------------------------------------


def panel_width(d: int) -> int:
    """D features in whole panels, which are also whole steps."""
    return round_up(d, SIDE)


def pairs_array(n_heads: int, n: int, d: int) -> Array:
    """X (n, n_heads, D) packed: heads, panels, a panel."""
    return Array((n_heads, panel_width(d) // SIDE, panel_bytes(round_up(n, BC)) // 2), np.uint16)


def transposed_array(n_heads: int, n: int, d: int, parts: int) -> Array:
    """Xᵀ packed: heads, panels, a panel."""
    return Array(
        (n_heads, round_up(n, BC) // SIDE, panel_bytes(parts * panel_width(d)) // 2), np.uint16
    )


# -- packing --------------------------------------------------------------------------------------


@kernel
def round_split(row, x, width, hi, lo, spare):
    """row (3, width) of bfloat16 = x: part `lo` holds what the others, `hi` and part 0, leave."""
    of, to = x.ctypes.data, row.ctypes.data
    if x.shape[0] < width:
        fill(spare, ZERO)
        for i in range(x.shape[0]):
            spare[i] = x[i]
        of = spare.ctypes.data
    split_row(to, to + 2 * hi * width, to + 2 * lo * width, of, width)


@kernel
def load_rows(rows, x, first, head, n_used, width, hi, lo, spare):
    """rows (n, ld) = rows `first` … of one head of x as bfloat16, split where `lo` is a part.

    Zeros from row `n_used` on. Rows lie a page or so apart, where the CPU foresees nothing.
    """
    for i in range(rows.shape[0]):
        row = rows[i]
        if first + i + _AHEAD < n_used:
            fetch(x[first + i + _AHEAD, head].ctypes.data, 4 * x.shape[2])
        if first + i >= n_used:
            fill(row, NOTHING)
        elif lo > 0:
            round_split(row, x[first + i, head], width, hi, lo, spare)
        else:
            round_padded(row.ctypes.data, x[first + i, head], spare)


@kernel
def pair_tile(panels, rows, width):
    """panels (width / SIDE, …) = an even number of rows of bfloat16, two to a row of pairs."""
    for i in range(0, rows.shape[0], 2):
        put_pairs(panels, i, rows[i], rows[i + 1], width)


@kernel
def transpose_tile(panel, rows, j, n_features):
    """Columns j … j + LANES of a panel = rows (LANES, ld) of bfloat16."""
    put_columns(panel.ctypes.data, j, rows, n_features // STEP)


@kernel
def columns_of(to, pairs, window, n_rows):
    """Columns `window` of n_rows rows, which come as pairs (n_rows / 2, …), as rows."""
    for j in range(0, window[1] - window[0], LANES):
        for i in range(0, n_rows // 2, LANES):
            here = to[window[0] + j].ctypes.data + 4 * i
            of = pairs[i, window[0] + j :].ctypes.data
            transpose(here, to.shape[1] // 2, of, pairs.shape[1])


# -- products -------------------------------------------------------------------------------------


@kernel
def scores(s, rows, packed, key, n_steps, starts, stops):
    """s = rows · packed for keys `key` … `key + BC`, in the squares that a group sees any of."""
    for j in range(0, BC, SIDE):
        panel = packed[(key + j) // SIDE].ctypes.data
        for g in range(starts.shape[0]):
            if starts[g] < key + j + SIDE and stops[g] > key + j:
                to, of = rows_of(s[g * SIDE :, j:]), rows_of(rows[g * SIDE :])
                micro_product(to, of, panel, n_steps, False)


@kernel
def add_to_queries(total, weights, packed, key, starts, stops):
    """total (queries, width) += weights · packed, from the keys `key` … `key + BC`; weights: words,
    pairs of keys."""
    for p in range(packed.shape[0]):
        for g in range(starts.shape[0]):
            start = max(starts[g] - key, 0) // STEP
            stop = (min(stops[g] - key, BC) + STEP - 1) // STEP
            if start < stop:
                to = rows_of(total[g * SIDE :, p * SIDE :])
                of = rows_of(weights[g * SIDE :, start * STEP // 2 :])
                panel = packed[p].ctypes.data + (key // STEP + start) * 2 * TILE_BYTES
                micro_product(to, of, panel, stop - start, True)


@kernel
def add_to_keys(total, weights, packed, key, window, starts, stops):
    """total[key + window] (keys, width) += weights · packed; weights has a row for each key."""
    for p in range(packed.shape[0]):
        for j in range(window[0], window[1], SIDE):
            start, stop = groups_that_see(starts, stops, key + j, key + j + SIDE)
            if start < stop:
                to = rows_of(total[key + j :, p * SIDE :])
                of = rows_of(weights[j:, start * SIDE :])
                panel = packed[p].ctypes.data + start * 2 * TILE_BYTES
                micro_product(to, of, panel, stop - start, True)
