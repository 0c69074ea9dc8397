"""Indices of 4 bits into a table of 16 whole numbers v, denser around zero:  x = d·s·v.

IQ4_NL   18 bytes for 32: d (float16), 16 bytes; byte j holds the index of weight j (low 4 bits) and
         j+16 (high); s is 1
IQ4_XS   136 bytes for 256: d, uint16 of high 2 bits of s+32 of each sub-block of 32, 4 bytes of low
         4 bits (byte i: sub-block 2i, then 2i+1), 128 bytes of indices as IQ4_NL's

Packing as in ggml: each sub-block is fitted by least squares, weighted by x² or by importance, for
16 trial scales; in IQ4_XS the best are rounded to 6 bits; then every weight gets the index of the
nearest v.
"""

import numpy as np

from pyggml.graph.dtypes import DTYPES
from pyggml.jit import exact
from pyggml.quants.base import Quant
from pyggml.quants.bits import extreme, inverse, nearest_int, put_f16
from pyggml.quants.layout import Block
from pyggml.quants.packers.fits import Given, nearest_level, weights_of

_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
_TABLE = [int(v) for v in _VALUES]

_ZERO = np.float32(0)
_TINY = np.float32(1e-15)  # ggml's GROUP_MAX_EPS: a sub-block below it counts as zero
_TRIALS = 7  # on each side of the scale that maps the extreme weight to −127


def _decode_iq4_nl(block: Block) -> None:
    block.add(block.f16(0), block.lookup(block.nibbles(2), _TABLE))


def _decode_iq4_xs(block: Block) -> None:
    low, high = block.fields(4, 4, 4), block.fields(2, 2, 2)
    s = block.minus(block.either(low, block.bits(high, 0, 2, to=4)), 32)
    scales = block.times(block.floats(s), block.f16(0))
    for i in range(8):
        v = block.lookup(block.nibbles(8 + 16 * i), _TABLE)
        block.add(block.lane(scales, i), v, 32 * i)


@exact
def _fit(x, w):
    """The scale of x ≈ scale·v."""
    peak = extreme(x)
    if abs(peak) < _TINY:
        return _ZERO
    scale = best = _ZERO
    for step in range(-_TRIALS - 1, _TRIALS + 1):
        per_level = (np.float32(step) + _VALUES[0]) / peak
        if step < -_TRIALS:  # the first of all maps the extreme weight to the first number
            per_level = np.float32(1) / (-peak / _VALUES[0])
        sum_xv = sum_v2 = _ZERO
        for j in range(x.size):
            v = _VALUES[nearest_level(per_level * x[j], _VALUES)]
            sum_xv += w[j] * v * x[j]
            sum_v2 += w[j] * v * v
        if sum_v2 > _ZERO and (step < -_TRIALS or sum_xv * sum_xv > best * sum_v2):
            scale = sum_xv / sum_v2
            best = scale * sum_xv
    return scale


@exact
def _choose(q, s, dst, src, weights):
    """Write d of each block, its indices to q (n_blocks, n_sub, 32), s + 32 to s (n_blocks, n_sub);
    a single sub-block has no s."""
    n_sub = q.shape[1]
    scales = np.empty(n_sub, np.float32)
    for b in range(src.shape[0]):
        for i in range(n_sub):
            part = slice(32 * i, 32 * i + 32)
            scales[i] = _fit(src[b, part], weights[b, part])
        d = scales[0] if n_sub == 1 else -extreme(scales) / np.float32(32)
        put_f16(dst, b, 0, d)
        for i in range(n_sub):
            step = max(-32, min(31, nearest_int(inverse(d) * scales[i])))
            s[b, i] = step + 32
            per_level = inverse(d if n_sub == 1 else d * np.float32(step))
            for j in range(32):
                q[b, i, j] = nearest_level(per_level * src[b, 32 * i + j], _VALUES)


def pack_iq4(
    dst: np.ndarray, src: np.ndarray, importance: Given = None, _means: Given = None
) -> None:
    n, n_sub = len(src), src.shape[1] // 32
    q, s = np.empty((n, n_sub, 32), np.uint8), np.empty((n, n_sub), np.uint8)
    weights = src * src if importance is None else weights_of(src, importance, 2)
    _choose(q, s, dst, src, weights)
    dst[:, -16 * n_sub :] = (q[..., :16] | q[..., 16:] << 4).reshape(n, -1)
    if n_sub > 1:
        high = (s >> 4).reshape(-1, 2, 4) << np.array([0, 2, 4, 6], np.uint8)
        dst[:, 2:4] = np.bitwise_or.reduce(high, axis=2)
        dst[:, 4:8] = s[:, ::2] & 15 | (s[:, 1::2] & 15) << 4


IQ4_NL = Quant(dtype=DTYPES["IQ4_NL"], decode=_decode_iq4_nl, pack=pack_iq4, fit=pack_iq4)
IQ4_XS = Quant(dtype=DTYPES["IQ4_XS"], decode=_decode_iq4_xs, pack=pack_iq4, fit=pack_iq4)
