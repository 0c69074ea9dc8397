"""The softmax of a tile of scores, forward and backward, whatever made the scores.

A tile's queries come in groups, as many as a microkernel takes at once; group g sees keys of
[starts[g], stops[g]) only, and products leave out what no query of a group sees.
"""

from typing import Any, NamedTuple

import numpy as np

from pyggml.jit import kernel
from pyggml.jit.simd import exp32, fill, row_max
from pyggml.kernels.gemm.panels import LANES, rounded_up

BC = 128  # keys of a tile (B_c of Dao et al.); a multiple of every panel
ZERO = np.float32(0)
MASKED = np.float32(-1e30)  # the score of a key that is not seen
NO_KEYS = np.float32(1e30)  # lse of a query that sees no key: e^(s − lse) is 0
_ALL_KEYS = 0x7FFFFFFF  # more than there are


class ScoreBlock(NamedTuple):
    """A tile of scores (rows, ld): of queries `first` … and the BC keys `key` …; `span` says which
    of them count. Columns outside `window` are not read."""

    span: Any
    first: int
    key: int
    window: tuple[int, int]


# -- which keys are seen ------------------------------------------------------------------------


@kernel
def group_ranges(starts, stops, span, first, group):
    """Fills starts and stops for groups of `group` queries; returns the range around them all."""
    fill(starts, np.int32(_ALL_KEYS))
    fill(stops, np.int32(0))
    start, stop = _ALL_KEYS, 0
    for g in range(starts.shape[0]):
        for i in range(first + g * group, min(first + (g + 1) * group, span.shape[0])):
            if span[i, 0] < span[i, 1]:
                starts[g], stops[g] = min(starts[g], span[i, 0]), max(stops[g], span[i, 1])
        start, stop = min(start, starts[g]), max(stop, stops[g])
    return start, stop


@kernel
def visible_columns(block, i):
    """Columns [start, stop) of a tile that row i's query sees; none for a query past the last."""
    query, span = block.first + i, block.span
    if query >= span.shape[0]:
        return 0, 0
    return max(span[query, 0] - block.key, 0), min(span[query, 1] - block.key, BC)


@kernel
def groups_that_see(starts, stops, start, stop):
    """The first group that sees any of the keys [start, stop), and the one past the last."""
    first, last = starts.shape[0], 0
    for g in range(starts.shape[0]):
        if starts[g] < stop and stops[g] > start:
            first, last = min(first, g), g + 1
    return first, last


@kernel
def columns_in(start, stop, key, group):
    """The columns of a tile of keys `key` … that lie in [start, stop), in whole groups."""
    first, last = max(start - key, 0), min(stop - key, BC)
    return first // group * group, rounded_up(last, group)


@kernel
def clear_unseen(row, left, right, window):
    """Zeros in the columns of the window that lie outside of [left, right), which may be empty."""
    last = window[1] if left >= right else min(left, window[1])
    for j in range(window[0], last):
        row[j] = ZERO
    for j in range(max(right, window[0], last), window[1]):
        row[j] = ZERO


# -- forward ------------------------------------------------------------------------------------


@kernel
def softmax_tile(s, o, m, norm, block, scale):
    """S becomes e^(scale·S − m), 0 for keys that are not seen inside the block's window.

    m holds each row's maximum so far, norm its sum; o and norm are rescaled where a maximum rises.
    """
    for i in range(s.shape[0]):
        start, stop = visible_columns(block, i)
        clear_unseen(s[i], start, stop, block.window)
        if start < stop:
            m[i], norm[i] = _softmax_row(s[i], start, stop, scale, o[i], m[i], norm[i])


@kernel
def _softmax_row(row, start, stop, scale, o, m, norm):
    """One row, in whole vectors around its columns [start, stop); the new m and norm."""
    scores = row[start // LANES * LANES : rounded_up(stop, LANES)]
    start, stop = start % LANES, start % LANES + stop - start
    for j in range(scores.shape[0]):
        scores[j] = scores[j] * scale if start <= j < stop else MASKED
    new = max(m, row_max(scores))
    if new > m:
        factor = exp32(m - new)
        norm *= factor
        for j in range(o.shape[0]):
            o[j] *= factor
    added = ZERO
    for j in range(scores.shape[0]):
        scores[j] = exp32(scores[j] - new)
        added += scores[j]
    return new, norm + added


@kernel
def divide_tile(o, lse, o_tile, m, norm, head, first, n):
    """n rows of one head: o = o_tile / norm and lse = m + log norm."""
    for i in range(n):
        seeing = norm[i] > 0
        lse[head, first + i] = m[i] + np.log(norm[i]) if seeing else NO_KEYS
        factor = 1 / norm[i] if seeing else ZERO
        to, of = o[first + i, head], o_tile[i]
        for j in range(to.shape[0]):
            to[j] = of[j] * factor


# -- backward -----------------------------------------------------------------------------------


@kernel
def softmax_tile_back(s, dp, lse, delta, block, scale):
    """S becomes P = e^(scale·S − lse) and dP becomes dS = P·(dP − δ), 0 for keys not seen.

    lse and delta are those of the tile's rows.
    """
    for i in range(s.shape[0]):
        start, stop = visible_columns(block, i)
        low, high = start // LANES * LANES, rounded_up(stop, LANES) if start < stop else 0
        clear_unseen(s[i], low, high, block.window)
        clear_unseen(dp[i], low, high, block.window)
        log_sum, mean = lse[i], delta[i]
        scores, gradients = s[i, low:high], dp[i, low:high]
        for j in range(scores.shape[0]):
            p = exp32(scores[j] * scale - log_sum) if start <= j + low < stop else ZERO
            scores[j] = p
            gradients[j] = p * (gradients[j] - mean)
