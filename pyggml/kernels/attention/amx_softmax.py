"""The softmax of a tile of scores on the path `amx`, forward and backward, row by row."""

from typing import Any, NamedTuple

import numpy as np

from pyggml.jit import kernel
from pyggml.kernels.attention.amx_tile import BC, LDP, LDS
from pyggml.kernels.attention.row_softmax import (
    raise_maximum,
    row_exponentials,
    row_gradients,
    row_top,
)
from pyggml.kernels.attention.softmax import ZERO, visible_columns
from pyggml.kernels.gemm.amx.tiles import SIDE


class ScoreBlock(NamedTuple):
    """What a tile of scores holds: queries `first` … and the BC keys `key` …. `span` says which of
    them count; the columns outside `window` are not read."""

    span: Any
    first: int
    key: int
    window: tuple[int, int]


@kernel
def _seen_of(block, i):
    """The first column that row i's query sees, counted from the window's, and how many it sees."""
    start, stop = visible_columns(block.span, block.first + i, block.key, BC)
    return np.int64(start - block.window[0]), np.int64(max(stop - start, 0))


@kernel
def softmax_rows(p, s, o, m, norm, block, scale):
    """P = e^(scale·S − m) as rows of bfloat16, 0 for keys that are not seen.

    m holds each row's maximum so far, norm its sum; o and norm are rescaled where a maximum rises.
    """
    left, n = block.window[0], np.int64(block.window[1] - block.window[0])
    for i in range(0, s.shape[0], SIDE):  # maxima ahead of what waits for them
        for j in range(i, i + SIDE):
            start, count = _seen_of(block, j)
            top = row_top(s[j, left:].ctypes.data, n, start, count, scale)
            if top > m[j]:
                raise_maximum(o[j], m, norm, j, top)
        for j in range(i, i + SIDE):
            start, count = _seen_of(block, j)
            to, of = p[j, left:].ctypes.data, s[j, left:].ctypes.data
            norm[j] += row_exponentials(to, of, n, start, count, scale, m[j])


@kernel
def softmax_rows_back(ds, p_pairs, ds_pairs, s, dp, lse, delta, block, scale):
    """P = e^(scale·S − lse) and dS = P·(dP − δ), 0 for keys that are not seen.

    ds: rows of bfloat16; p_pairs, ds_pairs: P and dS, two rows to a row of pairs, which begins with
    the window's first column. lse is that of all queries of a head, delta that of the tile's rows.
    """
    left, n = block.window[0], np.int64(block.window[1] - block.window[0])
    for i in range(0, s.shape[0], 2):
        start, count = _seen_of(block, i)
        below, its_count = _seen_of(block, i + 1)
        query = block.first + i
        row_gradients(
            s[i, left:].ctypes.data, dp[i, left:].ctypes.data, ds[i, left:].ctypes.data,
            p_pairs[i // 2].ctypes.data, ds_pairs[i // 2].ctypes.data, n,
            (start, count, below, its_count),
            (_lse_of(lse, query), delta[i], _lse_of(lse, query + 1), delta[i + 1]),
            (LDS, 2 * LDP), scale,
        )  # fmt: skip


@kernel
def _lse_of(lse, query):
    """The lse of a query; 0 past the last one."""
    return lse[query] if query < lse.shape[0] else ZERO
