"""Packing by importance: as ggml's packers with `quant_weights`, whose fits are weighted sums.

Each weight x_j of a column of importance c_j counts c_j·√(σ² + x_j²) in the fit of its block, where
σ² is the mean of x² over the block (twice that in K-quants but Q2_K, and in IQ4), over the row in
the types of 32; in Q6_K it counts c_j. The scales of sub-blocks are then fitted likewise: each
counts as much as the weights below it. Types that are not here ignore importance, as in ggml.

Source: ggml, src/ggml-quants.c (`quantize_row_*_impl`, `make_qx_quants`, `make_qkx3_quants`,
`make_qp_quants`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from pyggml._jit import exact
from pyggml.quants.bits import clear, copy, extreme, nearest_int, put_f16, two_bit_planes
from pyggml.quants.grid_signed import pack_iq2_s, pack_iq2_xs, pack_iq3_s, pack_iq3_xxs
from pyggml.quants.weighted_iq4 import pack_iq4

# pack(dst, src, importance, means): src and importance float32 (n_blocks, block), means float32
# (n_blocks,), the mean of x² over each block's row → dst uint8 (n_blocks, block_bytes).
PackWeighted = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]

_ZERO = np.float32(0)
_TINY = np.float32(1e-15)  # ggml's GROUP_MAX_EPS: a sub-block below it counts as zero


# -- fits -----------------------------------------------------------------------------------------


@exact
def _sum_squares(x):
    total = _ZERO
    for v in x:
        total += v * v
    return total


@exact
def _count_more(out, importance, x, sigma2):
    """out = importance·√(σ² + x²); returns its sum."""
    total = _ZERO
    for j in range(x.size):
        out[j] = importance[j] * np.sqrt(sigma2 + x[j] * x[j])
        total += out[j]
    return total


@exact
def _clip(v, half):
    return max(-half, min(half - 1, nearest_int(v)))


@exact
def _round(q, x, w, per_level, half):
    """q = half + the levels of x, clipped to 0 … 2·half − 1; their Σ w·x·level, Σ w·level²."""
    sum_xq = sum_q2 = _ZERO
    for j in range(x.size):
        level = _clip(per_level * x[j], half)
        q[j] = level + half
        v = np.float32(level)
        sum_xq += w[j] * x[j] * v
        sum_q2 += w[j] * v * v
    return sum_xq, sum_q2


@exact
def _fit(q, x, w, trial, half):
    """The best scale of x ≈ scale·(q − half); q is written, trial is scratch."""
    peak = extreme(x)
    if abs(peak) < _TINY:
        clear(q)
        return _ZERO
    sum_xq, sum_q2 = _round(q, x, w, np.float32(-half) / peak, half)
    scale = sum_xq / sum_q2 if sum_q2 != _ZERO else _ZERO
    best = scale * sum_xq
    for step in range(-9, 10):
        if step == 0:
            continue
        levels = np.float32(half) + np.float32(0.1) * np.float32(step)
        sum_xq, sum_q2 = _round(trial, x, w, -levels / peak, half)
        if sum_q2 > _ZERO and sum_xq * sum_xq > best * sum_q2:
            copy(q, trial)
            scale = sum_xq / sum_q2
            best = scale * sum_xq
    return scale


@exact
def _squared_error(x, w, q, scale, minimum):
    total = _ZERO
    for j in range(x.size):
        diff = scale * np.float32(q[j]) + minimum - x[j]
        total += w[j] * (diff * diff)
    return total


@exact
def _round_from(q, x, per_level, minimum, q_max):
    for j in range(x.size):
        q[j] = max(0, min(q_max, nearest_int(per_level * (x[j] - minimum))))


@exact
def _least_squares(x, w, q, sum_w, sum_x):
    """(scale, minimum ≤ 0) with the least squared error for these q, and whether it is unique."""
    sum_q = sum_q2 = sum_xq = _ZERO
    for j in range(x.size):
        level = np.float32(q[j])
        sum_q += w[j] * level
        sum_q2 += w[j] * level * level
        sum_xq += w[j] * level * x[j]
    determinant = sum_w * sum_q2 - sum_q * sum_q
    if not determinant > _ZERO:
        return _ZERO, _ZERO, False
    scale = (sum_w * sum_xq - sum_x * sum_q) / determinant
    minimum = (sum_q2 * sum_x - sum_q * sum_xq) / determinant
    if minimum > _ZERO:
        return sum_xq / sum_q2, _ZERO, True
    return scale, minimum, True


@exact
def _fit_from(q, x, w, trial, q_max):
    """The best (scale, −minimum) of x ≈ scale·q + minimum, minimum ≤ 0; q is written.

    The first trial divides the range of x into q_max levels, 37 others into q_max − 0.9 to
    q_max + 0.9.
    """
    minimum = maximum = x[0]
    sum_w, sum_x = w[0], w[0] * x[0]
    for j in range(1, x.size):
        minimum, maximum = min(minimum, x[j]), max(maximum, x[j])
        sum_w += w[j]
        sum_x += w[j] * x[j]
    minimum = min(minimum, _ZERO)
    if maximum <= minimum:
        clear(q)
        return _ZERO, -minimum
    per_level = np.float32(q_max) / (maximum - minimum)
    scale = np.float32(1) / per_level
    _round_from(q, x, per_level, minimum, q_max)
    best = _squared_error(x, w, q, scale, minimum)
    for step in range(37):
        levels = np.float32(-0.9) + np.float32(0.05) * np.float32(step) + np.float32(q_max)
        _round_from(trial, x, levels / (maximum - minimum), minimum, q_max)
        try_scale, try_minimum, found = _least_squares(x, w, trial, sum_w, sum_x)
        if found:
            error = _squared_error(x, w, trial, try_scale, try_minimum)
            if error < best:
                best, scale, minimum = error, try_scale, try_minimum
                copy(q, trial)
    return scale, -minimum


@exact
def _fit_above(q, x, w, q_max):
    """The best scale of x ≈ scale·q for x ≥ 0; q is written. Levels change one by one in the end,
    as long as the fit improves."""
    peak = _ZERO
    for v in x:
        peak = max(peak, v)
    if peak < _TINY:
        clear(q)
        return _ZERO
    per_level = np.float32(q_max) / peak
    best = np.float32(np.inf)
    for step in (0, -4, -3, -2, -1, 1, 2, 3, 4):
        trial = (np.float32(0.1) * np.float32(step) + np.float32(q_max)) / peak
        scale, error = np.float32(1) / trial, _ZERO
        for j in range(x.size):
            diff = x[j] - scale * np.float32(min(q_max, nearest_int(trial * x[j])))
            error += w[j] * diff * diff
        if error < best:
            best, per_level = error, trial
    sum_xq = sum_q2 = _ZERO
    for j in range(x.size):
        q[j] = min(q_max, nearest_int(per_level * x[j]))
        level = np.float32(q[j])
        sum_xq += w[j] * x[j] * level
        sum_q2 += w[j] * level * level
    for _ in range(5):
        sum_xq, sum_q2, changed = _improve(q, x, w, q_max, sum_xq, sum_q2)
        if not changed:
            break
    return sum_xq / sum_q2 if sum_q2 > _ZERO else _ZERO


@exact
def _improve(q, x, w, q_max, sum_xq, sum_q2):
    """Replace each level by the best one for the others; the new sums, and whether one changed."""
    changed = False
    for j in range(x.size):
        level = np.float32(q[j])
        rest_xq = sum_xq - w[j] * x[j] * level
        rest_q2 = sum_q2 - w[j] * level * level
        if rest_xq > _ZERO and rest_q2 > _ZERO:
            new = min(q_max, nearest_int(x[j] * rest_q2 / rest_xq))
            if new != np.int32(q[j]):
                level = np.float32(new)
                rest_xq += w[j] * x[j] * level
                rest_q2 += w[j] * level * level
                if rest_xq * rest_xq * sum_q2 > sum_xq * sum_xq * rest_q2:
                    q[j] = new
                    sum_xq, sum_q2, changed = rest_xq, rest_q2, True
    return sum_xq, sum_q2, changed


# -- blocks of 32 ---------------------------------------------------------------------------------


@exact
def row_means(out, x):
    """The mean of x² over each row of x (n_rows, n), summed in order."""
    for i in range(x.shape[0]):
        out[i] = _sum_squares(x[i]) / np.float32(x.shape[1])


@exact
def _choose_32(q, dst, src, importance, means, half):
    """Write d of each block, and its levels q + half to q, uint8 (n_blocks, 32)."""
    w, trial = np.empty(32, np.float32), np.empty(32, np.uint8)
    for b in range(src.shape[0]):
        _count_more(w, importance[b], src[b], means[b])
        put_f16(dst, b, 0, _fit(q[b], src[b], w, trial, half))


@exact
def _choose_32_from(q, dst, src, importance, means, q_max):
    """Write d and m of each block, and its levels to q, uint8 (n_blocks, 32)."""
    w, trial = np.empty(32, np.float32), np.empty(32, np.uint8)
    for b in range(src.shape[0]):
        _count_more(w, importance[b], src[b], means[b])
        scale, below = _fit_from(q[b], src[b], w, trial, q_max)
        put_f16(dst, b, 0, scale)
        put_f16(dst, b, 2, -below)


def _pack_32(dst, src, importance, means, *, choose, most, at):
    """Levels up to 15, or to 31 with their fifth bits in front, behind `at` bytes of scales."""
    q = np.empty((len(src), 32), np.uint8)
    choose(q, dst, src, importance, means, most)
    if dst.shape[1] > at + 16:
        dst[:, at : at + 4] = np.packbits(q >> 4, axis=1, bitorder="little")
        at += 4
    low = q & 15
    dst[:, at:] = low[:, :16] | low[:, 16:] << 4


# -- K-quants -------------------------------------------------------------------------------------


@exact
def _choose_from(q, s, m, dst, src, importance, q_max, s_max, d_at, factor):
    """Write d and dmin of each block, its levels to q (n_blocks, n_sub, size), s and m to s, m
    (n_blocks, n_sub), all uint8. factor: σ² / Σ x²."""
    n_sub, size = q.shape[1], q.shape[2]
    w, trial = np.empty(size, np.float32), np.empty(size, np.uint8)
    scales, minima, counts = (
        np.empty(n_sub, np.float32),
        np.empty(n_sub, np.float32),
        np.empty(n_sub, np.float32),
    )
    for b in range(src.shape[0]):
        sigma2 = np.float32(factor) * _sum_squares(src[b])
        for i in range(n_sub):
            x = src[b, size * i : size * i + size]
            counts[i] = _count_more(w, importance[b, size * i : size * i + size], x, sigma2)
            scales[i], minima[i] = _fit_from(q[b, i], x, w, trial, q_max)
        d = put_f16(dst, b, d_at, _fit_above(s[b], scales, counts, s_max))
        dmin = put_f16(dst, b, d_at + 2, _fit_above(m[b], minima, counts, s_max))
        for i in range(n_sub):
            scale, below = d * np.float32(s[b, i]), dmin * np.float32(m[b, i])
            if scale != _ZERO:
                for j in range(size):
                    level = nearest_int((src[b, size * i + j] + below) / scale)
                    q[b, i, j] = max(0, min(q_max, level))


def _pack_q2_k(dst, src, importance, means):
    q, s, m = _levels(src, 16)
    _choose_from(q, s, m, dst, src, importance, 3, 15, 80, 1 / 256)
    dst[:, :16] = s | m << 4
    dst[:, 16:80] = two_bit_planes(q)


def _pack_q4_k(dst, src, importance, means, *, q_max=15):
    q, s, m = _levels(src, 8)
    _choose_from(q, s, m, dst, src, importance, q_max, 63, 0, 2 / 256)
    dst[:, 4:8] = s[:, :4] | s[:, 4:] >> 4 << 6
    dst[:, 8:12] = m[:, :4] | m[:, 4:] >> 4 << 6
    dst[:, 12:16] = s[:, 4:] & 15 | (m[:, 4:] & 15) << 4
    if q_max > 15:
        dst[:, 16:48] = np.packbits(q >> 4, axis=1, bitorder="little")[:, 0]
    low = q & 15
    dst[:, -128:] = (low[:, 0::2] | low[:, 1::2] << 4).reshape(-1, 128)


def _levels(src, n_sub):
    """Room for the levels of sub-blocks, and for their s and m."""
    n = len(src)
    empty = (np.empty((n, n_sub), np.uint8) for _ in range(2))
    return np.empty((n, n_sub, 256 // n_sub), np.uint8), *empty


@exact
def _choose_q3_k(q, s, dst, src, importance):
    """Write d of each block, its levels q + 4 to q (n_blocks, 16, 16) and s + 32 to s."""
    w, trial = np.empty(16, np.float32), np.empty(16, np.uint8)
    scales, counts = np.empty(16, np.float32), np.empty(16, np.float32)
    for b in range(src.shape[0]):
        sigma2 = np.float32(2) * _sum_squares(src[b]) / np.float32(256)
        for i in range(16):
            x = src[b, 16 * i : 16 * i + 16]
            counts[i] = _count_more(w, importance[b, 16 * i : 16 * i + 16], x, sigma2)
            scales[i] = _fit(q[b, i], x, w, trial, 4)
        d = put_f16(dst, b, 108, _fit(s[b], scales, counts, trial, 32))
        for i in range(16):
            scale = d * np.float32(np.int32(s[b, i]) - np.int32(32))
            if scale != _ZERO:
                for j in range(16):
                    q[b, i, j] = 4 + _clip(src[b, 16 * i + j] / scale, 4)


def _pack_q3_k(dst, src, importance, means):
    q, s, _ = _levels(src, 16)
    _choose_q3_k(q, s, dst, src, importance)
    dst[:, :32] = np.packbits(q.reshape(-1, 8, 32) >> 2, axis=1, bitorder="little")[:, 0]
    dst[:, 32:96] = two_bit_planes(q)
    low, high = s & 15, s >> 4
    dst[:, 96:104] = low[:, :8] | low[:, 8:] << 4
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    dst[:, 104:108] = np.bitwise_or.reduce(high.reshape(-1, 4, 4) << shifts, axis=1)


@exact
def _choose_q6_k(q, dst, src, importance):
    """Write s and d of each block, and its levels q + 32 to q (n_blocks, 16, 16)."""
    trial, scales = np.empty(16, np.uint8), np.empty(16, np.float32)
    for b in range(src.shape[0]):
        for i in range(16):
            part = slice(16 * i, 16 * i + 16)
            scales[i] = _fit(q[b, i], src[b, part], importance[b, part], trial, 32)
        if abs(extreme(scales)) < _TINY:
            clear(dst[b])
            for i in range(16):
                clear(q[b, i])
            continue
        per_step = np.float32(-128) / extreme(scales)
        d = put_f16(dst, b, 208, np.float32(1) / per_step)
        for i in range(16):
            s = min(127, nearest_int(per_step * scales[i]))
            dst[b, 192 + i] = np.uint8(s & 255)
            scale = d * np.float32(s)
            if scale != _ZERO:
                for j in range(16):
                    q[b, i, j] = 32 + _clip(src[b, 16 * i + j] / scale, 32)


def _pack_q6_k(dst, src, importance, means):
    q, _, _ = _levels(src, 16)
    _choose_q6_k(q, dst, src, importance)
    rows = q.reshape(-1, 2, 4, 32)  # two halves of four rows of 32 weights
    low = rows & 15
    dst[:, :128] = (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128)
    dst[:, 128:192] = two_bit_planes(rows >> 4)


WEIGHTED: dict[str, PackWeighted] = {
    "Q4_0": partial(_pack_32, choose=_choose_32, most=8, at=2),
    "Q5_0": partial(_pack_32, choose=_choose_32, most=16, at=2),
    "Q4_1": partial(_pack_32, choose=_choose_32_from, most=15, at=4),
    "Q5_1": partial(_pack_32, choose=_choose_32_from, most=31, at=4),
    "Q2_K": _pack_q2_k,
    "Q3_K": _pack_q3_k,
    "Q4_K": _pack_q4_k,
    "Q5_K": partial(_pack_q4_k, q_max=31),
    "Q6_K": _pack_q6_k,
    "IQ4_NL": pack_iq4,
    "IQ4_XS": pack_iq4,
    "IQ3_S": pack_iq3_s,
    "IQ3_XXS": pack_iq3_xxs,
    "IQ2_S": pack_iq2_s,
    "IQ2_XS": pack_iq2_xs,
}
