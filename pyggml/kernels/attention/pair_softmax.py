"""The softmax of a tile of scores on the path `flash` with `pairs`, forward and backward.

Scores become probabilities as bfloat16 while they are in registers. A group of MR queries computes
the columns around the keys that any of its queries sees; the others of a tile get zeros, where
products read them.
"""

import numpy as np

from pyggml.jit import kernel
from pyggml.kernels.attention.row_softmax import (
    LANES,
    raise_maximum,
    row_exponentials,
    row_gradients,
    row_top,
)
from pyggml.kernels.attention.softmax import ZERO, visible_columns
from pyggml.kernels.attention.tiles import BC, LDS, MR
from pyggml.kernels.gemm.panels import rounded_up
from pyggml.sizes import round_up

LDP = round_up(LDS, LANES) // 2  # words from row to row of probabilities, pairs of keys


@kernel
def _columns_of_group(starts, stops, g, key):
    """The first column that a group's queries see, in whole vectors, and the one past the last."""
    first, last = max(starts[g] - key, 0), min(stops[g] - key, BC)
    return np.int64(first // LANES * LANES), np.int64(rounded_up(max(last, first), LANES))


@kernel
def _seen_of(span, query, key, left):
    """The first column that a query sees, counted from `left`, and how many it sees."""
    start, stop = visible_columns(span, query, key, BC)
    return np.int64(start - left), np.int64(max(stop - start, 0))


@kernel
def softmax_pairs(p, s, o, m, norm, span, first, key, starts, stops, scale):
    """P = e^(scale·S − m) as pairs of keys, 0 for keys that are not seen.

    m holds each row's maximum so far, norm its sum; o and norm are rescaled where a maximum rises.
    """
    for g in range(starts.shape[0]):
        left, right = _columns_of_group(starts, stops, g, key)
        n = right - left
        if n <= 0:
            continue
        for i in range(g * MR, (g + 1) * MR):  # maxima ahead of what waits for them
            start, count = _seen_of(span, first + i, key, left)
            top = row_top(s[i, left:].ctypes.data, n, start, count, scale)
            if top > m[i]:
                raise_maximum(o[i], m, norm, i, top)
        for i in range(g * MR, (g + 1) * MR):
            start, count = _seen_of(span, first + i, key, left)
            to, of = p[i, left // 2 :].ctypes.data, s[i, left:].ctypes.data
            norm[i] += row_exponentials(to, of, n, start, count, scale, m[i])


@kernel
def _clear(row, left, right, window):
    """Zeros in the columns of the window that lie outside of [left, right)."""
    for j in range(window[0], min(left, window[1])):
        row[j] = ZERO
    for j in range(max(right, window[0]), window[1]):
        row[j] = ZERO


@kernel
def softmax_pairs_back(
    ds, p_pairs, ds_pairs, s, dp, lse, delta, span, first, key, window, starts, stops, scale
):
    """P = e^(scale·S − lse) and dS = P·(dP − δ), 0 for keys that are not seen.

    ds: pairs of keys; p_pairs, ds_pairs: P and dS as pairs of queries, zeros in what of `window` is
    not seen. lse and delta are those of the tile's rows.
    """
    for i in range(0, s.shape[0], 2):
        left, right = _columns_of_group(starts, stops, i // MR, key)
        if (i + 1) // MR > i // MR:
            others = _columns_of_group(starts, stops, i // MR + 1, key)
            left, right = min(left, others[0]), max(right, others[1])
        _clear(p_pairs[i // 2], left, right, window)
        _clear(ds_pairs[i // 2], left, right, window)
        if left >= right:
            continue
        start, count = _seen_of(span, first + i, key, left)
        below, its_count = _seen_of(span, first + i + 1, key, left)
        row_gradients(
            s[i, left:].ctypes.data, dp[i, left:].ctypes.data, ds[i, left // 2 :].ctypes.data,
            p_pairs[i // 2, left:].ctypes.data, ds_pairs[i // 2, left:].ctypes.data, right - left,
            (start, count, below, its_count), (lse[i], delta[i], lse[i + 1], delta[i + 1]),
            (LDS, 4 * LDP), scale,
        )  # fmt: skip
