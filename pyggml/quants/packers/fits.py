"""Weighted least squares: the fits of which the packers of several types are made.

A fit chooses the levels q of a sub-block x so that Σ w·error² is small, and returns its scale. w is
how much each weight counts, trial is scratch of q's size.

Source: ggml, src/ggml-quants.c (`make_qx_quants`, `make_qkx2_quants`, `make_qkx3_quants`,
`make_qp_quants`).
"""

import numpy as np

from pyggml.jit import exact
from pyggml.quants.bits import clear, copy, extreme, nearest_int

Given = np.ndarray | None  # importance, float32 (n_blocks, block)

_ZERO = np.float32(0)
_TINY = np.float32(1e-15)  # ggml's GROUP_MAX_EPS: a sub-block below it counts as zero


@exact
def nearest_level(v, levels):
    """The index of the level nearest to v, of rising ones; of two equally near, the higher."""
    last = levels.size - 1
    if v <= levels[0]:
        return 0
    if v >= levels[last]:
        return last
    below, above = 0, last
    while above - below > 1:
        middle = (below + above) // 2
        if v < levels[middle]:
            above = middle
        else:
            below = middle
    return below if v - levels[below] < levels[above] - v else above


# -- how much weights count -----------------------------------------------------------------------


@exact
def total(x):
    """The sum of x (n,), in order."""
    sum_ = _ZERO
    for v in x:
        sum_ += v
    return sum_


@exact
def mean_squares(out, x, times):
    """out (n_rows,) = times · the mean of x² over each row of x (n_rows, n), summed in order."""
    for i in range(x.shape[0]):
        squares = _ZERO
        for v in x[i]:
            squares += v * v
        out[i] = np.float32(times) * squares / np.float32(x.shape[1])


@exact
def _weigh(w, x, importance, sigma2):
    for b in range(x.shape[0]):
        for j in range(x.shape[1]):
            w[b, j] = importance[b, j] * np.sqrt(sigma2[b] + x[b, j] * x[b, j])


def weights_of(
    x: np.ndarray, importance: Given, times: float, sigma2: np.ndarray | None = None
) -> np.ndarray:
    """importance · √(σ² + x²) for blocks x (n_blocks, n), or σ² + x² without importance.

    sigma2 (n_blocks,): `times` the mean of x² over a block, if it is not given.
    """
    if sigma2 is None:
        sigma2 = np.zeros(len(x), np.float32)
        if times:
            mean_squares(sigma2, x, times)
    if importance is None:
        return x * x + sigma2[:, None]
    w = np.empty_like(x)
    _weigh(w, x, importance, sigma2)
    return w


# -- x ≈ scale·(q − zero) -------------------------------------------------------------------------


@exact
def clip(v, zero):
    """v rounded to an integer, clipped to −zero … zero − 1."""
    return max(-zero, min(zero - 1, nearest_int(v)))


@exact
def round_levels(q, x, w, per_level, zero):
    """q = zero + the levels of x, clipped to 0 … 2·zero − 1; their Σ w·x·level, Σ w·level²."""
    sum_xq = sum_q2 = _ZERO
    for j in range(x.size):
        level = clip(per_level * x[j], zero)
        q[j] = level + zero
        v = np.float32(level)
        sum_xq += w[j] * x[j] * v
        sum_q2 += w[j] * v * v
    return sum_xq, sum_q2


@exact
def fit_levels(q, x, w, trial, zero):
    """The best scale of x ≈ scale·(q − zero), of 19 trials."""
    peak = extreme(x)
    if abs(peak) < _TINY:
        clear(q)
        return _ZERO
    sum_xq, sum_q2 = round_levels(q, x, w, np.float32(-zero) / peak, zero)
    scale = sum_xq / sum_q2 if sum_q2 != _ZERO else _ZERO
    best = scale * sum_xq
    for step in range(-9, 10):
        if step == 0:
            continue
        levels = np.float32(zero) + np.float32(0.1) * np.float32(step)
        sum_xq, sum_q2 = round_levels(trial, x, w, -levels / peak, zero)
        if sum_q2 > _ZERO and sum_xq * sum_xq > best * sum_q2:
            copy(q, trial)
            scale = sum_xq / sum_q2
            best = scale * sum_xq
    return scale


# -- x ≈ scale·q + minimum ------------------------------------------------------------------------


@exact
def _error(x, w, q, scale, minimum, squared):
    """Weighted squared or absolute error of x ≈ scale·q + minimum."""
    error = _ZERO
    for j in range(x.size):
        diff = scale * np.float32(q[j]) + minimum - x[j]
        error += w[j] * (diff * diff if squared else abs(diff))
    return error


@exact
def _round_from(q, x, per_level, minimum, q_max):
    """q = round((x − minimum)·per_level), clipped to 0 … q_max."""
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
def fit_from(q, x, w, trial, q_max, trials, squared):
    """The best (scale, −minimum) of x ≈ scale·q + minimum, minimum ≤ 0.

    The first trial divides the range of x into q_max levels; with trials = (first, width, n) n + 1
    others divide it into q_max + first, q_max + first + width, … The error is a sum of squares or
    of absolute values.
    """
    first, width, n_steps = trials
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
    best = _error(x, w, q, scale, minimum, squared)
    for step in range(n_steps + 1):
        levels = np.float32(first) + np.float32(width) * np.float32(step) + np.float32(q_max)
        _round_from(trial, x, levels / (maximum - minimum), minimum, q_max)
        try_scale, try_minimum, is_solved = _least_squares(x, w, trial, sum_w, sum_x)
        if is_solved:
            error = _error(x, w, trial, try_scale, try_minimum, squared)
            if error < best:
                best, scale, minimum = error, try_scale, try_minimum
                copy(q, trial)
    return scale, -minimum


# -- x ≈ scale·q ----------------------------------------------------------------------------------


@exact
def fit_above(q, x, w, q_max):
    """The best scale of x ≈ scale·q, x ≥ 0 but for a few. Levels change one by one in the end, as
    long as the fit improves. A level below 0 becomes 256 more where q, uint8, holds it, as in
    ggml."""
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
            level = min(q_max, nearest_int(trial * x[j]))
            diff = x[j] - scale * np.float32(level if step != 0 else level & 255)
            error += w[j] * diff * diff
        if error < best:
            best, per_level = error, trial
    sum_xq = sum_q2 = _ZERO
    for j in range(x.size):
        level = min(q_max, nearest_int(per_level * x[j]))
        q[j] = level & 255
        sum_xq += w[j] * x[j] * np.float32(level)
        sum_q2 += w[j] * np.float32(level) * np.float32(level)
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
                    q[j] = new & 255
                    sum_xq, sum_q2, changed = rest_xq, rest_q2, True
    return sum_xq, sum_q2, changed
