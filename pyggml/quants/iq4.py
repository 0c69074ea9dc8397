"""Indices of 4 bits into a table of 16 whole numbers v, denser around zero:  x = d·s·v.

IQ4_NL   18 bytes for 32: d (float16), 16 bytes; byte j holds the index of weight j (low 4 bits) and
         j+16 (high); s is 1
IQ4_XS   136 bytes for 256: d, uint16 of high 2 bits of s+32 of each sub-block of 32, 4 bytes of low
         4 bits (byte i: sub-block 2i, then 2i+1), 128 bytes of indices as IQ4_NL's

Packing as in ggml: each sub-block is fitted by least squares, weighted by x², for 16 trial scales;
in IQ4_XS the best are rounded to 6 bits; then every weight gets the index of the nearest v.
"""

from __future__ import annotations

import numpy as np

from pyggml._jit import exact
from pyggml.dtypes import DTYPES
from pyggml.quants.base import F16_LIMIT, Quant
from pyggml.quants.bits import clear, extreme, inverse, nearest_int, put_f16
from pyggml.quants.layout import Block

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
def _least_squares(x, per_level):
    """Σ w·v·x and Σ w·v², w = x², v nearest to x·per_level."""
    sum_xv = sum_v2 = _ZERO
    for j in range(x.size):
        v = _VALUES[_nearest(per_level * x[j])]
        weight = x[j] * x[j]
        sum_xv += weight * v * x[j]
        sum_v2 += weight * v * v
    return sum_xv, sum_v2


@exact
def _fit(x):
    """The scale of x ≈ scale·v."""
    peak = extreme(x)
    if abs(peak) < _TINY:
        return _ZERO
    first = np.float32(1) / (-peak / _VALUES[0])
    sum_xv, sum_v2 = _least_squares(x, first)
    scale = sum_xv / sum_v2 if sum_v2 > _ZERO else _ZERO
    best = scale * sum_xv
    for step in range(-_TRIALS, _TRIALS + 1):
        sum_xv, sum_v2 = _least_squares(x, (np.float32(step) + _VALUES[0]) / peak)
        if sum_v2 > _ZERO and sum_xv * sum_xv > best * sum_v2:
            scale = sum_xv / sum_v2
            best = scale * sum_xv
    return scale


@exact
def _put_indices(dst, b, start, x, scale):
    """Write the 16 bytes of the nearest indices of 32 weights."""
    per_level = inverse(scale)
    for j in range(16):
        first, second = _nearest(per_level * x[j]), _nearest(per_level * x[16 + j])
        dst[b, start + j] = np.uint8(first | (second << 4))


@exact
def _pack_iq4_nl(dst, src):
    for b in range(src.shape[0]):
        scale = _fit(src[b])
        put_f16(dst, b, 0, scale)
        _put_indices(dst, b, 2, src[b], scale)


@exact
def _pack_iq4_xs(dst, src):
    scales = np.empty(8, np.float32)
    for b in range(src.shape[0]):
        for i in range(8):
            scales[i] = _fit(src[b, 32 * i : 32 * i + 32])
        clear(dst[b])
        d = -extreme(scales) / np.float32(32)
        put_f16(dst, b, 0, d)
        per_level = inverse(d)
        for i in range(8):
            s = max(-32, min(31, nearest_int(per_level * scales[i])))
            _put_indices(dst, b, 8 + 16 * i, src[b, 32 * i : 32 * i + 32], d * np.float32(s))
            dst[b, 4 + i // 2] |= np.uint8(((s + 32) & 15) << (4 * (i % 2)))
            dst[b, 2 + i // 4] |= np.uint8(((s + 32) >> 4) << (2 * (i % 4)))


IQ4_NL = Quant(dtype=DTYPES["IQ4_NL"], decode=_decode_iq4_nl, pack=_pack_iq4_nl, limit=F16_LIMIT)
IQ4_XS = Quant(dtype=DTYPES["IQ4_XS"], decode=_decode_iq4_xs, pack=_pack_iq4_xs, limit=F16_LIMIT)
