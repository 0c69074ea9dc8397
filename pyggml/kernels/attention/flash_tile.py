"""Tiles of attention for the microkernels, of float32 and of pairs of bfloat16.

They are the kernels that pyggml.kernels.attention.tiles names.
"""

from typing import Any, ClassVar

import numpy as np

from pyggml.jit import kernel
from pyggml.jit.simd import fill
from pyggml.kernels.attention.softmax import BC, ZERO
from pyggml.kernels.attention.tiles import AttentionTiles, TileSizes
from pyggml.kernels.gemm.microkernel import make_strided_product
from pyggml.kernels.gemm.panels import (
    LANES,
    PAIR_NUMBERS,
    round_numbers,
    round_row,
    round_two,
    transpose_rounded,
    transpose_words,
)
from pyggml.kernels.gemm.tile import ATTENTION_FLOATS, ATTENTION_PAIRS

MR, PANEL = ATTENTION_FLOATS.mr, ATTENTION_FLOATS.panel  # of pairs, too
BR = BC // MR * MR  # queries, in whole groups; a group's scores stay in the first cache
FLOATS = TileSizes(BR, MR, together=MR, panel=PANEL, per_word=1, step=1, lanes=LANES)
PAIRS = FLOATS._replace(per_word=2, step=2)

float_product = make_strided_product(ATTENTION_FLOATS)
pair_product = make_strided_product(ATTENTION_PAIRS)
_PANEL = np.int64(PANEL)


@kernel
def _copy_row(row, x, t, head, n_used):
    """row = one head of x at t, or zeros from `n_used` on; zeros after its D numbers."""
    d = x.shape[2] if t < n_used else 0
    for i in range(d):
        row[i] = x[t, head, i]
    fill(row[d:], ZERO)


class MicroTiles(AttentionTiles):
    """What both have."""

    transpose_pairs: ClassVar[Any]

    @kernel
    def pack_transposed(f, packed, x, first, head, n_used, spare):
        n_words = packed.shape[1] // PANEL
        for t in range(first, first + BC, LANES):
            to = packed[t // PANEL].ctypes.data + t % PANEL * 4
            if f.transpose_pairs(to, x, t, head, n_used, n_words):
                continue
            rows = spare[: LANES * n_words].reshape(LANES, n_words)
            f.load_rows(rows, x, t, head, n_used, spare[LANES * n_words :])
            transpose_words(to, PANEL, rows.ctypes.data, n_words, n_words)

    @kernel
    def load(f, rows, packed, x, first, n_rows, head, spare):
        f.load_rows(rows, x, first, head, x.shape[0], spare)
        of_rows = packed[:, 0:]  # as `pack` is compiled for a part of longer panels
        f.pack(of_rows, x, first, n_rows, head, x.shape[0], spare)


class FloatTiles(MicroTiles, common=True):
    SIZES = FLOATS

    @kernel
    def sizes(f):
        return FLOATS

    @kernel
    def load_rows(f, rows, x, first, head, n_used, spare):
        for i in range(rows.shape[0]):
            _copy_row(rows[i], x, first + i, head, n_used)

    @kernel
    def pack(f, packed, x, first, n, head, n_used, spare):
        row = spare[: packed.shape[0] * PANEL]
        for t in range(n):
            _copy_row(row, x, first + t, head, n_used)
            for p in range(packed.shape[0]):
                to, of = packed[p, t * PANEL :], row[p * PANEL :]
                for j in range(PANEL):
                    to[j] = of[j]

    @kernel
    def transpose_pairs(f, to, x, t, head, n_used, n_words):
        return False

    @kernel
    def multiply(f, a, row, step, b, c, ldc, depth, adding):
        float_product(a, row, step, b, _PANEL, c, ldc, depth, adding)


class PairTiles(MicroTiles, common=True):
    SIZES = PAIRS

    @kernel
    def sizes(f):
        return PAIRS

    @kernel
    def load_rows(f, rows, x, first, head, n_used, spare):
        n, d = max(0, min(rows.shape[0], n_used - first)), x.shape[2]
        if d % PAIR_NUMBERS == 0 and n > 0:
            of = x[first, head].ctypes.data
            for i in range(n):
                round_row(rows.ctypes.data + i * d * 2, of + i * x.shape[1] * d * 4, d)
        else:
            for i in range(n):
                round_numbers(rows[i], x[first + i, head], spare)
        fill(rows[n:].reshape(-1), ZERO)

    @kernel
    def pack(f, packed, x, first, n, head, n_used, spare):
        width = packed.shape[0] * PANEL
        one, other = spare[:width], spare[width : 2 * width]
        for t in range(0, n, 2):
            if x.shape[2] == width and first + t + 1 < n_used:
                a, b = x[first + t, head].ctypes.data, x[first + t + 1, head].ctypes.data
            else:
                _copy_row(one, x, first + t, head, n_used)
                _copy_row(other, x, first + t + 1, head, n_used)
                a, b = one.ctypes.data, other.ctypes.data
            for p in range(packed.shape[0]):
                to, at = packed[p, t // 2 * PANEL :].ctypes.data, p * PANEL * 4
                round_two(to, a + at, b + at, _PANEL)

    @kernel
    def transpose_pairs(f, to, x, t, head, n_used, n_words):
        """Whether rows could be rounded while they are transposed, and were."""
        d = x.shape[2]
        if d != 2 * n_words or t + LANES > n_used:
            return False
        of = x[t, head].ctypes.data
        for j in range(0, n_words, LANES):
            transpose_rounded(to + j * PANEL * 4, PANEL, of + j * 8, x.shape[1] * d)
        return True

    @kernel
    def multiply(f, a, row, step, b, c, ldc, depth, adding):
        pair_product(a, row, step, b, _PANEL, c, ldc, depth, adding)
