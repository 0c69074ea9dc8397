"""The softmax of a tile of scores on the path `flash` with `pairs`, forward and backward.

Scores become probabilities as bfloat16 while they are in registers. A group of MR queries computes
the columns around the keys that any of its queries sees; the others of a tile get zeros, where
products read them.
"""

import numpy as np

from pyggml.jit import kernel
from pyggml.jit.simd import exp32
from pyggml.kernels.attention.row_softmax import (
    LANES,
    row_gradients,
    row_powers,
    row_top,
)
from pyggml.kernels.attention.softmax import MASKED, ZERO, visible_columns
from pyggml.kernels.attention.tiles import BC, LDS, MR
from pyggml.kernels.gemm.panels import rounded_up
from pyggml.sizes import round_up

LDP = round_up(LDS, LANES) // 2  # words from row to row of probabilities, pairs of keys


@kernel
def _columns_of_group(starts, stops, g, key):
    """The first column that a group's queries see, in whole vectors, and the one past the last;
    BC and 0 where they see none."""
    first, last = max(starts[g] - key, 0), min(stops[g] - key, BC)
    if first >= last:
        return np.int64(BC), np.int64(0)
    return np.int64(first // LANES * LANES), np.int64(rounded_up(last, LANES))


@kernel
def _seen_of(span, query, key, left):
    """The first column that a query sees, counted from `left`, and how many it sees."""
    start, stop = visible_columns(span, query, key, BC)
    return np.int64(start - left), np.int64(max(stop - start, 0))


@kernel
def softmax_pairs(p, s, o, m, norms, span, first, key, starts, stops, scale):
    """P = e^(scale·S − m) as pairs of keys, 0 for keys that are not seen.

    m is near each row's maximum so far: that of a tile; its sum is that of the row's lanes in
    `norms`. o and norms are rescaled where m rises, which a row in range need not.
    """
    for g in range(starts.shape[0]):
        left, right = _columns_of_group(starts, stops, g, key)
        n = right - left
        if n <= 0:
            continue
        for i in range(g * MR, (g + 1) * MR):
            start, count = _seen_of(span, first + i, key, left)
            to, of = p[i, left // 2 :].ctypes.data, s[i, left:].ctypes.data
            sums = norms[i].ctypes.data
            if m[i] > MASKED and row_powers(to, of, n, start, count, sums, scale, m[i]):
                continue
            top = row_top(of, n, start, count, scale)
            if top > m[i]:
                _raise(o[i], norms[i], exp32(m[i] - top))
                m[i] = top
            row_powers(to, of, n, start, count, sums, scale, m[i])


@kernel
def _raise(o, norms, factor):
    for j in range(o.shape[0]):
        o[j] *= factor
    for j in range(norms.shape[0]):
        norms[j] *= factor


@kernel
def add_lanes(norm, norms):
    """The sum of each row."""
    for i in range(norms.shape[0]):
        norm[i] = ZERO
        for j in range(norms.shape[1]):
            norm[i] += norms[i, j]


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
