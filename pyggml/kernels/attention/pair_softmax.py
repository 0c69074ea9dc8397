"""The softmax of a tile of scores as rows of bfloat16, forward and backward.

Scores become probabilities while they are in registers. P and dS are words that hold two numbers
each, neighbouring keys of a row or, for products that sum over queries, neighbouring queries.
"""

import numpy as np

from pyggml.jit import kernel
from pyggml.jit.simd import exp32
from pyggml.kernels.attention.row_softmax import (
    LANES,
    raise_maximum,
    row_exponentials,
    row_gradients,
    row_powers,
    row_top,
)
from pyggml.kernels.attention.softmax import (
    BC,
    MASKED,
    ZERO,
    clear_unseen,
    columns_in,
    visible_columns,
)


@kernel
def _columns_of_group(starts, stops, g, key, step):
    """The first column that a group's queries see, in whole steps, and the one past the last; BC
    and 0 where they see none."""
    first, last = columns_in(starts[g], stops[g], key, step)
    return (np.int64(first), np.int64(last)) if first < last else (np.int64(BC), np.int64(0))


@kernel
def _seen_of(block, i, left):
    """The first column that row i's query sees, counted from `left`, and how many it sees."""
    start, stop = visible_columns(block, i)
    return np.int64(start - left), np.int64(max(stop - start, 0))


# -- forward --------------------------------------------------------------------------------------


@kernel
def softmax_rows(p, s, o, m, norm, block, group, scale):
    """P = e^(scale·S − m), 0 for keys of the block's window that are not seen.

    m holds each row's maximum so far, norm its sum; o and norm are rescaled where a maximum rises.
    Rows come `group` at a time: maxima ahead of what waits for them.
    """
    left, n = block.window[0], np.int64(block.window[1] - block.window[0])
    for i in range(0, s.shape[0], group):
        for j in range(i, i + group):
            start, count = _seen_of(block, j, left)
            top = row_top(s[j, left:].ctypes.data, n, start, count, scale)
            if top > m[j]:
                raise_maximum(o[j], m, norm, j, top)
        for j in range(i, i + group):
            start, count = _seen_of(block, j, left)
            to, of = p[j, left // 2 :].ctypes.data, s[j, left:].ctypes.data
            norm[j] += row_exponentials(to, of, n, start, count, scale, m[j])


@kernel
def softmax_pairs(p, s, o, m, norms, block, starts, stops, scale):
    """The same of the columns around the keys that any query of a group sees.

    m is near each row's maximum so far: that of a tile; its sum is that of the row's lanes in
    `norms`. o and norms are rescaled where m rises, which a row in range need not.
    """
    group = s.shape[0] // starts.shape[0]
    for g in range(starts.shape[0]):
        left, right = _columns_of_group(starts, stops, g, block.key, LANES)
        n = right - left
        if n <= 0:
            continue
        for i in range(g * group, (g + 1) * group):
            start, count = _seen_of(block, i, left)
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


# -- backward -------------------------------------------------------------------------------------


@kernel
def softmax_pairs_back(
    ds, p_pairs, ds_pairs, s, dp, lse, delta, block, starts, stops, group, step, scale
):
    """P = e^(scale·S − lse) and dS = P·(dP − δ), 0 for keys that are not seen.

    ds: pairs of keys, in the whole steps of columns that any query of a group sees; p_pairs,
    ds_pairs: P and dS as pairs of queries, zeros in what of the block's window is not seen. lse and
    delta are those of the tile's rows.
    """
    for i in range(0, s.shape[0], 2):
        left, right = _columns_of_group(starts, stops, i // group, block.key, step)
        if (i + 1) // group > i // group:
            next_columns = _columns_of_group(starts, stops, i // group + 1, block.key, step)
            left, right = min(left, next_columns[0]), max(right, next_columns[1])
        clear_unseen(p_pairs[i // 2], left, right, block.window)
        clear_unseen(ds_pairs[i // 2], left, right, block.window)
        if left >= right:
            continue
        start, count = _seen_of(block, i, left)
        below, its_count = _seen_of(block, i + 1, left)
        row_gradients(
            s[i, left:].ctypes.data, dp[i, left:].ctypes.data, ds[i, left // 2 :].ctypes.data,
            p_pairs[i // 2, left:].ctypes.data, ds_pairs[i // 2, left:].ctypes.data, right - left,
            (start, count, below, its_count), (lse[i], delta[i], lse[i + 1], delta[i + 1]),
            (s.shape[1], 4 * ds.shape[1]), scale,
        )  # fmt: skip
