"""Packing as IQ1: groups of eight weights become points of −1, 0 and 1, all shifted by ±1/8.

Sorted, the weights of a sub-block are split in three, for −1, 0 and 1: of all splits and shifts,
the one with the best fit gives the scale. Groups that are no point of the grid then take the point
with the least error among those near them. IQ1_S has sub-blocks of 32 weights with one shift; IQ1_M
has 16, and a shift for each half.

Source: ggml, src/ggml-quants.c (`quantize_row_iq1_s_impl`, `quantize_row_iq1_m_impl`).
"""

from typing import NamedTuple

import numpy as np

from pyggml.jit import exact
from pyggml.quants.bits import clear, extreme, nearest_int
from pyggml.quants.packers.fits import Given, weights_of
from pyggml.quants.packers.grid_points import grid
from pyggml.quants.packers.grid_signed import join_fields

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_NONE = np.float32(np.finfo(np.float32).min)  # worse than every fit
# What −1, 0 and 1 stand for: shifted up, then down.
_SHIFTED = np.array([[-0.875, 0.125, 1.125], [-1.125, -0.125, 0.875]], np.float32)


@exact
def _sort(order, x):
    """order[i]: the index of the i-th smallest of x; equal ones keep their order."""
    for i in range(x.size):
        at = i
        while at > 0 and x[order[at - 1]] > x[i]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = i


@exact
def _add_up(sums, order, w, x, n_halves):
    """sums[0, h, i] = Σ w·x and sums[1, h, i] = Σ w over those of the i smallest weights that are
    in half h; all weights are one half, or the first and the second are."""
    for h in range(n_halves):
        sums[0, h, 0] = sums[1, h, 0] = _ZERO
    for i in range(x.size):
        j = order[i]
        for h in range(n_halves):
            mine = n_halves == 1 or h == j // (x.size // 2)
            sums[0, h, i + 1] = sums[0, h, i] + (w[j] * x[j] if mine else _ZERO)
            sums[1, h, i + 1] = sums[1, h, i] + (w[j] if mine else _ZERO)


@exact
def _split(sums, fits):
    """(scale, i, k, shift) of the best split: levels change at i and k of the sorted weights.

    fits (4, n + 1): scratch.
    """
    n = fits.shape[1] - 1
    sum_wx, sum_w = sums[0, 0], sums[1, 0]
    best, scale, first, second, shift = _NONE, _ZERO, -1, -1, 0
    for i in range(n + 1):
        for s in range(2):
            low, middle, high = _SHIFTED[s]
            for k in range(i, n + 1):
                fits[2 * s, k] = (
                    sum_wx[i] * low
                    + (sum_wx[k] - sum_wx[i]) * middle
                    + (sum_wx[n] - sum_wx[k]) * high
                )
                fits[2 * s + 1, k] = (
                    sum_w[i] * low * low
                    + (sum_w[k] - sum_w[i]) * middle * middle
                    + (sum_w[n] - sum_w[k]) * high * high
                )
        for k in range(i, n + 1):
            for s in range(2):
                sum_xv, sum_v2 = fits[2 * s, k], fits[2 * s + 1, k]
                if sum_v2 > _ZERO and sum_xv * sum_xv > best * sum_v2:
                    scale = sum_xv / sum_v2
                    best = scale * sum_xv
                    first, second, shift = i, k, s
    return scale, first, second, shift


@exact
def _split_halves(sums, fits):
    """As `_split`, with a shift for each half: that of the first is shift // 2, of the second
    shift % 2."""
    n = fits.shape[1] - 1
    best, scale, first, second, shift = _NONE, _ZERO, -1, -1, 0
    for i in range(n + 1):
        for h in range(2):
            sum_wx, sum_w = sums[0, h], sums[1, h]
            for s in range(2):
                low, middle, high = _SHIFTED[s]
                a, b = low * low - middle * middle, middle * middle - high * high
                for k in range(i, n + 1):
                    fits[4 * h + 2 * s, k] = sum_wx[n] * high - (sum_wx[i] + sum_wx[k])
                    fits[4 * h + 2 * s + 1, k] = (
                        sum_w[n] * high * high + sum_w[i] * a + sum_w[k] * b
                    )
        for k in range(i, n + 1):
            for s in range(4):
                one, other = 2 * (s // 2), 4 + 2 * (s % 2)
                sum_xv = fits[one, k] + fits[other, k]
                sum_v2 = fits[one + 1, k] + fits[other + 1, k]
                if sum_v2 > _ZERO and sum_xv * sum_xv > best * sum_v2:
                    scale = sum_xv / sum_v2
                    best = scale * sum_xv
                    first, second, shift = i, k, s
    return scale, first, second, shift


@exact
def _nearest(at, x, w, scale, values, points, code, errors):
    """The point near `code` with the least error for the eight weights from `at` on; of equals
    the first."""
    levels, _, start, near = points
    for level in range(3):
        for j in range(8):
            diff = scale * values[level] - x[at + j]
            errors[level, j] = w[at + j] * diff * diff
    best, nearest = np.float32(np.inf), np.int64(near[start[code]])
    for k in range(start[code], start[code + 1]):
        point = np.int64(near[k])
        error = _ZERO
        for j in range(8):
            error += errors[levels[point, j], j]
        if error < best:
            best, nearest = error, point
    return nearest


@exact
def _to_points(indices, q, x, w, scale, down, points, errors):
    """The points of groups, to indices (n_groups,), and the scale for them; down (n_groups,)."""
    levels, index = points[0], points[1]
    is_moved = False
    for g in range(indices.size):
        code = np.int64(0)
        for j in range(8 * g + 7, 8 * g - 1, -1):
            code = code * 3 + q[j]
        point = np.int64(index[code])
        if point < 0:
            is_moved = True
            point = _nearest(8 * g, x, w, scale, _SHIFTED[down[g]], points, code, errors)
        indices[g] = point
    if is_moved:
        sum_xv, sum_v2 = _add_points(_ZERO, _ZERO, indices, x, w, down, _ONE, levels)
        if sum_xv > _ZERO and sum_v2 > _ZERO:
            return sum_xv / sum_v2
    return scale


@exact
def _add_points(sum_xv, sum_v2, indices, x, w, down, step, levels):
    """The sums plus Σ w·x·v and Σ w·v² of v = step·(point + shift)."""
    for g in range(indices.size):
        for j in range(8):
            v = _SHIFTED[down[g], levels[indices[g], j]] * step
            sum_xv += w[8 * g + j] * v * x[8 * g + j]
            sum_v2 += w[8 * g + j] * v * v
    return sum_xv, sum_v2


@exact
def _fit(indices, down, x, w, points, scratch, tiny):
    """The scale ≥ 0 of a sub-block; its points and shifts are written."""
    order, q, sums, fits, errors = scratch
    n_halves = sums.shape[1]
    clear(indices)
    clear(down)
    if abs(extreme(x)) < np.float32(tiny):
        return _ZERO
    _sort(order, x)
    _add_up(sums, order, w, x, n_halves)
    if n_halves == 1:
        scale, first, second, shift = _split(sums, fits)
    else:
        scale, first, second, shift = _split_halves(sums, fits)
    if first < 0:
        return _ZERO
    for i in range(x.size):
        q[order[i]] = (i >= first) + (i >= second)
    if scale < _ZERO:
        scale, shift = -scale, 2 * n_halves - 1 - shift
        for i in range(x.size):
            q[i] = 2 - q[i]
    for g in range(indices.size):
        down[g] = shift if n_halves == 1 else (shift // 2 if g == 0 else shift % 2)
    return _to_points(indices, q, x, w, scale, down, points, errors)


@exact
def _fit_d(d, indices, down, s, x, w, levels):
    """The scale of a block for its rounded s; d, if nothing counts."""
    size = x.size // s.size
    n_groups = size // 8
    sum_xv = sum_v2 = _ZERO
    for i in range(s.size):
        part, mine = slice(size * i, size * i + size), slice(n_groups * i, n_groups * (i + 1))
        step = np.float32(2 * np.int32(s[i]) + 1)
        sum_xv, sum_v2 = _add_points(
            sum_xv, sum_v2, indices[mine], x[part], w[part], down[mine], step, levels
        )
    return sum_xv / sum_v2 if sum_v2 > _ZERO else d


@exact
def _choose(indices, down, s, d, src, weights, points, n_halves, tiny):
    """Write the points of each block and their shifts to indices and down (n_blocks, 32), s to s
    (n_blocks, n_sub), and d, which with two halves is fitted for the rounded s."""
    n_sub = s.shape[1]
    size = 256 // n_sub
    n_groups = size // 8
    scales, order, q = (
        np.empty(n_sub, np.float32),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
    )
    sums = np.empty((2, n_halves, size + 1), np.float32)
    fits, errors = np.empty((4 * n_halves, size + 1), np.float32), np.empty((3, 8), np.float32)
    scratch = (order, q, sums, fits, errors)
    for b in range(src.shape[0]):
        largest = _ZERO
        for i in range(n_sub):
            x, w = src[b, size * i : size * i + size], weights[b, size * i : size * i + size]
            mine = slice(n_groups * i, n_groups * (i + 1))
            scales[i] = _fit(indices[b, mine], down[b, mine], x, w, points, scratch, tiny)
            largest = max(largest, scales[i])
        d[b] = largest / np.float32(15)
        for i in range(n_sub):
            step = nearest_int(_HALF * (_ONE / d[b] * scales[i] - _ONE))
            s[b, i] = max(0, min(7, step)) if d[b] > _ZERO else 0
        if n_halves == 2 and d[b] > _ZERO:
            d[b] = _fit_d(d[b], indices[b], down[b], s[b], src[b], weights[b], points[0])


class _ChosenPoints(NamedTuple):
    """Of each block: its points uint16 (n_blocks, 32), whether they are shifted down uint8
    (n_blocks, 32), s uint8 (n_blocks, n_sub) and d float32 (n_blocks,)."""

    points: np.ndarray
    down: np.ndarray
    s: np.ndarray
    d: np.ndarray


def _choose_points(src: np.ndarray, importance: Given, n_sub: int, tiny: float) -> _ChosenPoints:
    n = len(src)
    points, down = np.empty((n, 32), np.uint16), np.empty((n, 32), np.uint8)
    choice = _ChosenPoints(points, down, np.empty((n, n_sub), np.uint8), np.empty(n, np.float32))
    weights = weights_of(src, importance, 0 if importance is None else 2)
    _choose(*choice, src, weights, grid("IQ1_S"), n_sub // 8, tiny)
    return choice


def pack_iq1_s(dst: np.ndarray, src: np.ndarray, importance: np.ndarray, _means: Given) -> None:
    points, down, s, d = _choose_points(src, importance, 8, 1e-12)
    dst[:, :2] = _as_float16(d * np.float32(1.125)).view(np.uint8)
    dst[:, 2:34] = points & 255
    top = s.astype(np.uint16) | down[:, ::4].astype(np.uint16) << 3
    dst[:, 34:] = (join_fields(points >> 8, 3) | top << 12).view(np.uint8)


def pack_iq1_m(
    dst: np.ndarray, src: np.ndarray, importance: Given = None, _means: Given = None
) -> None:
    points, down, s, d = _choose_points(src, importance, 16, 1e-7)
    dst[:, :32] = points & 255
    extra = (points >> 8).astype(np.uint8) | down << 3
    dst[:, 32:48] = extra[:, ::2] | extra[:, 1::2] << 4
    bits = _as_float16(d * np.float32(1.1125)) >> np.array([0, 4, 8, 12], np.uint16)
    dst[:, 48:] = (join_fields(s.astype(np.uint16), 3) | (bits & 15) << 12).view(np.uint8)


def _as_float16(d: np.ndarray) -> np.ndarray:
    """d (n,) as float16: their bits, uint16 (n, 1). What is too large becomes infinite."""
    with np.errstate(over="ignore"):
        return d.astype("<f2").view(np.uint16)[:, None]
