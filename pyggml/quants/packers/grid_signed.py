"""Packing as IQ2 and IQ3: groups of weights become points of a grid, with signs.

A level q stands for 2q + 1, so that a sub-block of 16 or 32 weights is  |x| ≈ scale·(2q + 1). Some
scales are tried. Each rounds every weight to a level. A group whose levels are no point of the grid
takes the point with the least error of those near it. The best trial gives the scale by least
squares, for which the groups are chosen again. Then the scales are rounded to 4 bits.

Source: ggml, src/ggml-quants.c (`quantize_row_iq2_xxs_impl`, `…_iq2_xs_impl`, `…_iq2_s_impl`,
`…_iq3_xxs_impl`, `…_iq3_s_impl`). There IQ3_S puts weights behind 32 zeros in the wrong place.
"""

from typing import NamedTuple

import numpy as np

from pyggml.jit import exact
from pyggml.quants.bits import clear, copy, nearest_int, put_f16
from pyggml.quants.packers.fits import Given, fit_above, weights_of
from pyggml.quants.packers.grid_points import grid

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)

# Which groups are chosen again for the best scale: those that were moved to a near point; all, if
# one was moved; or all.
_MOVED, _ALL_IF_MOVED, _ALL = 0, 1, 2


class _Way(NamedTuple):
    """What differs between the types.

    size        weights of a sub-block
    n_levels    of a weight
    even        whether the number of minus signs of 8 weights is even: seven bits hold the signs
    tiny        a sub-block below it counts as zero
    n_trials    trial scales on each side of the one that makes the largest weight the top level
    width       between trials, in top levels
    again       _MOVED, _ALL_IF_MOVED or _ALL
    factor      of d, so that the rounded scales err less
    """

    size: int
    n_levels: int
    even: bool
    tiny: float
    n_trials: int
    width: float
    again: int
    factor: float


@exact
def _split(size, signs, x, w, even):
    """x (n,) = size with signs, a byte for 8 weights. If their minus signs must be even in number
    but are not, the weight that counts least gets the other sign."""
    for k in range(signs.size):
        minus, is_odd, at, least = 0, False, 0, np.float32(np.inf)
        for j in range(8):
            v = x[8 * k + j]
            if v < _ZERO:
                minus |= 1 << j
                is_odd = not is_odd
            size[8 * k + j] = abs(v)
            counts = w[8 * k + j] * v * v
            if counts < least:
                at, least = j, counts
        if even and is_odd:
            size[8 * k + at] = -size[8 * k + at]
            minus ^= 1 << at
        signs[k] = minus


@exact
def _round_all(rounded, errors, x, root, per_level, scale):
    """Each weight's nearest level, and its error at every level: errors (n_levels, n)."""
    n_levels = errors.shape[0]
    for j in range(x.size):
        level = nearest_int(_HALF * (per_level * x[j] - _ONE))
        rounded[j] = max(0, min(n_levels - 1, level))
    for level in range(n_levels):
        for j in range(x.size):
            diff = scale * np.float32(2 * level + 1) - x[j]
            errors[level, j] = root[j] * diff * diff


@exact
def _nearest(at, group, errors, points, code):
    """The point near `code` with the least error for the weights from `at` on; of equals the
    first."""
    levels, _, start, near = points
    best, nearest = np.float32(np.inf), np.int64(near[start[code]])
    for k in range(start[code], start[code + 1]):
        point = np.uint64(near[np.uint64(k)])
        error = _ZERO
        for i in range(0, group, 4):
            for j in range(i, i + 4):  # of known length, so that it is unrolled
                error += errors[np.uint64(levels[point, np.uint64(j)]), np.uint64(at + j)]
        if error < best:
            best, nearest = error, np.int64(point)
    return nearest


@exact
def _code(q, at, group, n_levels):
    """The levels of a group as the digits of a number."""
    code = np.int64(0)
    for i in range(at + group - 1, at - 1, -1):
        code = code * n_levels + np.int64(q[i])
    return code


@exact
def _to_points(q, moved, rounded, errors, points):
    """Choose the points of those groups that `moved` (n_groups,) marks, with their levels to q;
    leaves the marks of those whose rounded levels were no point."""
    levels, index = points[0], points[1]
    group = levels.shape[1]
    for k in range(moved.size):
        if moved[k]:
            at = group * k
            code = _code(rounded, at, group, errors.shape[0])
            point = np.int64(index[code])
            moved[k] = point < 0
            if point < 0:
                point = _nearest(at, group, errors, points, code)
            for i in range(group):
                q[at + i] = levels[point, i]


@exact
def _sums(x, w, q):
    """Σ w·x·v and Σ w·v² of v = 2q + 1."""
    sum_xv = sum_v2 = _ZERO
    for j in range(x.size):
        v = np.float32(2 * np.int32(q[j]) + 1)
        sum_xv += w[j] * x[j] * v
        sum_v2 += w[j] * v * v
    return sum_xv, sum_v2


@exact
def _first_trial(q, x, w, way):
    """(peak, scale): the weight that the middle trial puts on the top level, and the scale of a
    sub-block that no trial fits. Both are 0 for a sub-block that counts as zero. q is scratch."""
    peak = x.max()
    if peak < np.float32(way.tiny):
        return _ZERO, _ZERO
    if way.again == _ALL:
        scale = fit_above(q, x, w, way.n_levels + 1)
        return scale * np.float32(way.n_levels), scale
    return peak, peak / np.float32(2 * way.n_levels - 1)


@exact
def _fit(q, x, w, root, peak, scale, points, scratch, way):
    """The scale of a sub-block x ≈ scale·(2q + 1); q, the levels of points, is written."""
    trial, rounded, moved, moved_in_trial, errors = scratch
    top = np.float32(2 * way.n_levels - 1)
    clear(q)
    moved[:] = way.again != _MOVED
    best = _ZERO
    for step in range(-way.n_trials, way.n_trials + 1):
        per_level = (top + np.float32(step) * np.float32(way.width)) / peak
        moved_in_trial[:] = True
        _round_all(rounded, errors, x, root, per_level, _ONE / per_level)
        _to_points(trial, moved_in_trial, rounded, errors, points)
        sum_xv, sum_v2 = _sums(x, w, trial)
        if sum_v2 > _ZERO and sum_xv * sum_xv > best * sum_v2:
            scale = sum_xv / sum_v2
            best = scale * sum_xv
            copy(q, trial)
            copy(moved, moved_in_trial)
    if scale > _ZERO and (way.again == _ALL or moved.any()):
        for k in range(moved.size):
            moved[k] |= way.again != _MOVED
        _round_all(rounded, errors, x, root, _ONE / scale, scale)
        _to_points(q, moved, rounded, errors, points)
        sum_xv, sum_v2 = _sums(x, w, q)
        if sum_v2 > _ZERO:
            scale = sum_xv / sum_v2
    return scale


@exact
def _choose(indices, signs, s, dst, src, weights, points, way):
    """Write d of each block, and its points, signs and s to indices (n_blocks, n_groups), signs
    (n_blocks, 32) and s (n_blocks, n_sub)."""
    levels, index, _, _ = points
    group, size, n_sub = levels.shape[1], way.size, s.shape[1]
    x, root, q = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.uint8)
    errors, scales = np.empty((way.n_levels, size), np.float32), np.empty(n_sub, np.float32)
    n_groups = size // group
    moved = np.empty((2, n_groups), np.bool_)
    scratch = (np.empty(size, np.uint8), np.empty(size, np.uint8), moved[0], moved[1], errors)
    for b in range(src.shape[0]):
        largest = _ZERO
        for i in range(n_sub):
            w = weights[b, size * i : size * i + size]
            minus = signs[b, size // 8 * i : size // 8 * (i + 1)]
            here = indices[b, n_groups * i : n_groups * (i + 1)]
            _split(x, minus, src[b, size * i : size * i + size], w, way.even)
            peak, scale = _first_trial(q, x, w, way)
            if not peak > _ZERO:
                scales[i] = _ZERO
                clear(minus)
                clear(here)
                continue
            for j in range(size):
                root[j] = np.sqrt(w[j])
            scale = _fit(q, x, w, root, peak, scale, points, scratch, way)
            if scale < _ZERO:  # where only the weight of the wrong sign counts
                scale = -scale
                for k in range(minus.size):
                    minus[k] = ~minus[k]
            for k in range(n_groups):
                here[k] = index[_code(q, group * k, group, way.n_levels)]
            scales[i] = scale
            largest = max(largest, scale)
        d = largest / np.float32(31)
        put_f16(dst, b, 0, d * np.float32(way.factor))
        for i in range(n_sub):
            step = nearest_int(_HALF * (_ONE / d * scales[i] - _ONE))
            s[b, i] = max(0, min(15, step)) if d > _ZERO else 0


_WAYS = {
    "IQ2_XXS": _Way(32, 3, True, tiny=1e-15, n_trials=6, width=0.1, again=_ALL, factor=1.0),
    "IQ2_XS": _Way(16, 3, True, tiny=1e-15, n_trials=9, width=0.1, again=_MOVED, factor=1.0),
    "IQ2_S": _Way(16, 3, False, tiny=1e-8, n_trials=9, width=0.1, again=_MOVED, factor=0.9875),
    "IQ3_XXS": _Way(32, 8, True, tiny=1e-8, n_trials=15, width=0.2, again=_MOVED, factor=1.0125),
    "IQ3_S": _Way(
        32, 8, False, tiny=1e-45, n_trials=9, width=0.2, again=_ALL_IF_MOVED, factor=1.033
    ),
}


def _points(
    name: str, dst: np.ndarray, src: np.ndarray, importance: Given, times: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points uint16 (n_blocks, n_groups), signs uint8 (n_blocks, 32) and s uint8 (n_blocks, n_sub)
    of blocks; d is written. times: see `weights_of`."""
    points, way, n = grid(name), _WAYS[name], len(src)
    weights = weights_of(src, importance, times)
    indices = np.empty((n, 256 // points.levels.shape[1]), np.uint16)
    signs, s = np.empty((n, 32), np.uint8), np.empty((n, 256 // way.size), np.uint8)
    _choose(indices, signs, s, dst, src, weights, points, way)
    return indices, signs, s


def pack_iq2_xxs(dst: np.ndarray, src: np.ndarray, importance: np.ndarray, _means: Given) -> None:
    indices, signs, s = _points("IQ2_XXS", dst, src, importance, 1)
    words = np.empty((len(src), 8, 2), np.uint32)
    words[..., 0] = join_fields(indices.astype(np.uint32), 8)
    words[..., 1] = join_fields((signs & 127).astype(np.uint32), 7) | s.astype(np.uint32) << 28
    dst[:, 2:] = words.reshape(-1, 16).view(np.uint8)


def pack_iq2_xs(dst: np.ndarray, src: np.ndarray, importance: np.ndarray, _means: Given) -> None:
    indices, signs, s = _points("IQ2_XS", dst, src, importance, 1)
    dst[:, 2:66] = (indices | (signs & 127).astype(np.uint16) << 9).view(np.uint8)
    dst[:, 66:] = s[:, ::2] | s[:, 1::2] << 4


def pack_iq2_s(
    dst: np.ndarray, src: np.ndarray, importance: Given = None, _means: Given = None
) -> None:
    indices, signs, s = _points("IQ2_S", dst, src, importance, 0.5 if importance is None else 2)
    dst[:, 2:34] = indices & 255
    dst[:, 34:66] = signs
    dst[:, 66:74] = join_fields(indices >> 8, 2)
    dst[:, 74:] = s[:, ::2] | s[:, 1::2] << 4


def pack_iq3_xxs(
    dst: np.ndarray, src: np.ndarray, importance: Given = None, _means: Given = None
) -> None:
    indices, signs, s = _points("IQ3_XXS", dst, src, importance, 0 if importance is None else 2)
    dst[:, 2:66] = indices
    words = join_fields((signs & 127).astype(np.uint32), 7) | s.astype(np.uint32) << 28
    dst[:, 66:] = words.view(np.uint8)


def pack_iq3_s(
    dst: np.ndarray, src: np.ndarray, importance: Given = None, _means: Given = None
) -> None:
    indices, signs, s = _points("IQ3_S", dst, src, importance, 0 if importance is None else 2)
    dst[:, 2:66] = indices & 255
    dst[:, 66:74] = np.packbits((indices >> 8).astype(np.uint8), axis=1, bitorder="little")
    dst[:, 74:106] = signs
    dst[:, 106:] = s[:, ::2] | s[:, 1::2] << 4


def join_fields(fields: np.ndarray, n_bits: int) -> np.ndarray:
    """Each four fields of n_bits as one number."""
    shifts = np.arange(0, 4 * n_bits, n_bits, dtype=fields.dtype)
    return np.bitwise_or.reduce(fields.reshape(len(fields), -1, 4) << shifts, axis=2)
