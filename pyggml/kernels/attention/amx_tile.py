"""Tiles of attention for Intel's tile registers; operands are bfloat16 (pyggml.kernels.gemm.amx).

They are the kernels that pyggml.kernels.attention.tiles names.

Scores enter an exponential, which makes relative errors of absolute ones. So the forward pass
splits their operands: x = hi + lo, both bfloat16. Then q·k = hi·hi + lo·hi + hi·lo is one product
of three times as many features, with rows (hi, lo, hi) and columns (hi, hi, lo). It is off by
2^−16 of what is summed, not by 2^−8.
"""

import numpy as np

from pyggml.jit import kernel
from pyggml.jit.simd import fill
from pyggml.kernels.attention.softmax import BC, ZERO
from pyggml.kernels.attention.tiles import AttentionTiles, TileSizes
from pyggml.kernels.gemm.amx.rows import (
    LANES,
    LINE,
    put_columns,
    put_pairs,
    round_padded,
    split_row,
    transpose,
)
from pyggml.kernels.gemm.amx.tiles import (
    SIDE,
    STEP,
    RowAddress,
    configure,
    micro_product,
    release,
)
from pyggml.kernels.gemm.microkernel import fetch
from pyggml.kernels.gemm.panels import rounded_up

BR = 128
REGISTERS = TileSizes(BR, SIDE, BR, SIDE, per_word=2, step=STEP, lanes=LANES, pad=LINE // 4)
SPLIT = REGISTERS._replace(parts=3)
COLUMNS = BC, BR // 2 + REGISTERS.pad  # a tile's keys in rows of pairs of queries
_AHEAD = 6  # rows that are fetched before they are read
_HI, _LO, _AGAIN = np.int64(0), np.int64(1), np.int64(2)  # parts; _HI for another: not split


@kernel
def _round_split(row, x, width, again, lo, spare):
    """row (3, width) of bfloat16 = x: part `lo` holds what the others, `again` and part 0,
    leave."""
    of, to = x.ctypes.data, row.ctypes.data
    if x.shape[0] < width:
        fill(spare, ZERO)
        for i in range(x.shape[0]):
            spare[i] = x[i]
        of = spare.ctypes.data
    split_row(to, to + 2 * again * width, to + 2 * lo * width, of, width)


@kernel
def _load(rows, x, first, head, n_used, again, lo, spare):
    """rows (n, words) = rows `first` … of one head of x as bfloat16, split where `lo` is a part.

    Zeros from row `n_used` on. Rows lie a page or so apart, where the CPU foresees nothing.
    """
    width = rounded_up(x.shape[2], STEP)
    for i in range(rows.shape[0]):
        row = rows[i]
        if first + i + _AHEAD < n_used:
            fetch(x[first + i + _AHEAD, head].ctypes.data, 4 * x.shape[2])
        if first + i >= n_used:
            fill(row, ZERO)
        elif lo > 0:
            _round_split(row, x[first + i, head], width, again, lo, spare[:width])
        else:
            round_padded(row.ctypes.data, x[first + i, head], spare)


@kernel
def _few_rows(f, x, parts, spare):
    """Room in `spare` for LANES rows of so many parts, the room after it, and steps of a row."""
    n_steps = parts * rounded_up(x.shape[2], STEP) // STEP
    words = n_steps * (STEP // 2) + f.sizes().pad
    return spare[: LANES * words].reshape(LANES, words), spare[LANES * words :], n_steps


@kernel
def _transpose(f, packed, x, first, head, n_used, parts, again, lo, spare):
    rows, spare, n_steps = _few_rows(f, x, parts, spare)
    for t in range(first, first + BC, LANES):
        _load(rows, x, t, head, n_used, again, lo, spare)
        put_columns(packed[t // SIDE].ctypes.data, t % SIDE, rows, n_steps)


@kernel
def _pair(panels, first, rows, width):
    """Rows of panels from row `first` on = rows of bfloat16, two to a row of pairs."""
    for i in range(0, rows.shape[0], 2):
        put_pairs(panels, first + i, rows[i], rows[i + 1], width)


class RegisterTiles(AttentionTiles, common=True):
    SIZES = REGISTERS

    @kernel
    def sizes(f):
        return REGISTERS

    @kernel
    def begin(f, thread):
        configure()

    @kernel
    def end(f, thread):
        release()

    @kernel
    def load_rows(f, rows, x, first, head, n_used, spare):
        _load(rows, x, first, head, n_used, _HI, _HI, spare)

    @kernel
    def pack(f, packed, x, first, n, head, n_used, spare):
        rows, spare, n_steps = _few_rows(f, x, np.int64(1), spare)
        for t in range(0, n, LANES):
            _load(rows, x, first + t, head, n_used, _HI, _HI, spare)
            _pair(packed, t, rows, n_steps * STEP)

    @kernel
    def load(f, rows, packed, x, first, n_rows, head, spare):
        _load(rows, x, first, head, x.shape[0], _HI, _HI, spare)
        _pair(packed, np.int64(0), rows, rounded_up(x.shape[2], STEP))

    @kernel
    def pack_transposed(f, packed, x, first, head, n_used, spare):
        _transpose(f, packed, x, first, head, n_used, np.int64(1), _HI, _HI, spare)

    @kernel
    def multiply(f, a, row, step, b, c, ldc, depth, adding):
        n_steps = depth // (STEP // 2)
        micro_product(RowAddress(c, 4 * ldc), RowAddress(a, 4 * row), b, n_steps, adding)


class SplitTiles(RegisterTiles, common=True):
    """The same with scores of split numbers."""

    SIZES = SPLIT

    @kernel
    def sizes(f):
        return SPLIT

    @kernel
    def load_rows(f, rows, x, first, head, n_used, spare):
        _load(rows, x, first, head, n_used, _AGAIN, _LO, spare)

    @kernel
    def pack_transposed(f, packed, x, first, head, n_used, spare):
        parts = np.int64(SPLIT.parts)
        _transpose(f, packed, x, first, head, n_used, parts, _LO, _AGAIN, spare)


@kernel
def columns_of(to, pairs, window, n_rows):
    """Columns `window` of n_rows rows, which come as pairs (n_rows / 2, …), as rows."""
    for j in range(0, window[1] - window[0], LANES):
        for i in range(0, n_rows // 2, LANES):
            here = to[window[0] + j].ctypes.data + 4 * i
            of = pairs[i, window[0] + j :].ctypes.data
            transpose(here, to.shape[1], of, pairs.shape[1])
