"""IQ4_NL and IQ4_XS packed by importance; see pyggml.quants.weighted."""

from __future__ import annotations

import numpy as np

from pyggml._jit import BlockCode, exact
from pyggml.quants.arrays import decode
from pyggml.quants.bits import extreme, inverse, nearest_int, put_f16
from pyggml.quants.iq4 import IQ4_NL

_ZERO = np.float32(0)
_TINY = np.float32(1e-15)  # ggml's GROUP_MAX_EPS: a sub-block below it counts as zero


def _table():
    """The numbers that IQ4's indices stand for, as its decoder has them."""
    raw, out = np.zeros((1, 18), np.uint8), np.empty((1, 32), np.float32)
    raw[0, :2] = np.array([1], "<f2").view(np.uint8)
    raw[0, 2:] = np.arange(16)
    assert not isinstance(IQ4_NL.decode, BlockCode)
    decode(IQ4_NL.decode, raw, out)
    return out[0, :16].copy()


_VALUES = _table()


@exact
def _nearest(v):
    """The index of the table's number nearest to v; of two equally near, the higher."""
    if v <= _VALUES[0]:
        return 0
    if v >= _VALUES[15]:
        return 15
    below, above = 0, 15
    while above - below > 1:
        middle = (below + above) // 2
        if v < _VALUES[middle]:
            above = middle
        else:
            below = middle
    return above - 1 if v - _VALUES[above - 1] < _VALUES[above] - v else above


@exact
def _fit_table(x, w):
    """The scale of x ≈ scale·v, of 16 trials."""
    peak = extreme(x)
    if abs(peak) < _TINY:
        return _ZERO
    scale = best = _ZERO
    for step in range(-8, 8):
        per_level = (np.float32(step) + _VALUES[0]) / peak
        if step == -8:  # the first of all maps the extreme weight to the first number
            per_level = np.float32(1) / (-peak / _VALUES[0])
        sum_xv = sum_v2 = _ZERO
        for j in range(x.size):
            v = _VALUES[_nearest(per_level * x[j])]
            sum_xv += w[j] * v * x[j]
            sum_v2 += w[j] * v * v
        if sum_v2 > _ZERO and (step == -8 or sum_xv * sum_xv > best * sum_v2):
            scale = sum_xv / sum_v2
            best = scale * sum_xv
    return scale


@exact
def _choose(q, s, dst, src, importance):
    """Write d of each block, its indices to q (n_blocks, n_sub, 32), s + 32 to s (n_blocks, n_sub);
    a single sub-block has no s."""
    n_sub = q.shape[1]
    w, scales = np.empty(32, np.float32), np.empty(n_sub, np.float32)
    for b in range(src.shape[0]):
        sigma2 = _ZERO
        for v in src[b]:
            sigma2 += v * v
        sigma2 *= np.float32(2) / np.float32(src.shape[1])
        for i in range(n_sub):
            x = src[b, 32 * i : 32 * i + 32]
            for j in range(32):
                w[j] = importance[b, 32 * i + j] * np.sqrt(sigma2 + x[j] * x[j])
            scales[i] = _fit_table(x, w)
        d = scales[0] if n_sub == 1 else -extreme(scales) / np.float32(32)
        put_f16(dst, b, 0, d)
        for i in range(n_sub):
            step = max(-32, min(31, nearest_int(inverse(d) * scales[i])))
            s[b, i] = step + 32
            per_level = inverse(d if n_sub == 1 else d * np.float32(step))
            for j in range(32):
                q[b, i, j] = _nearest(per_level * src[b, 32 * i + j])


def pack_iq4(dst, src, importance, means):
    n_sub = src.shape[1] // 32
    q, s = np.empty((len(src), n_sub, 32), np.uint8), np.empty((len(src), n_sub), np.uint8)
    _choose(q, s, dst, src, importance)
    dst[:, -16 * n_sub :] = (q[..., :16] | q[..., 16:] << 4).reshape(len(src), -1)
    if n_sub > 1:
        high = (s >> 4).reshape(-1, 2, 4) << np.array([0, 2, 4, 6], np.uint8)
        dst[:, 2:4] = np.bitwise_or.reduce(high, axis=2)
        dst[:, 4:8] = s[:, ::2] & 15 | (s[:, 1::2] & 15) << 4
