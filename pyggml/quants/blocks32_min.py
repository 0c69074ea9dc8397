"""Blocks of 32 weights with a scale d and a minimum m, both halves:  x = d·q + m.

Q4_1   20 bytes: d, m, 16 × uint8; byte j holds q of weight j (low 4 bits) and j+16 (high)
Q5_1   24 bytes: d, m, uint32 of fifth bits (bit j: weight j), 16 bytes as Q4_1's
"""

from __future__ import annotations

import numpy as np

from pyggml._jit import block_code, carray, exact
from pyggml.dtypes import DTYPES
from pyggml.quants.base import HALF_LIMIT, Quant
from pyggml.quants.bits import clear, half_at, inverse, lanes, put_half, truncate


@exact
def _put_range(dst, b, x, top):
    """Write d and m of the block x; returns 1/d and m before they were rounded to halves."""
    low = high = x[0]
    for v in x:
        low, high = min(low, v), max(high, v)
    d = (high - low) / np.float32(top)
    put_half(dst, b, 0, d)
    put_half(dst, b, 2, low)
    return inverse(d), low


@exact
def _level(v, top):
    """v ≥ 0 rounded, at most top."""
    return min(truncate(v + np.float32(0.5)), np.int32(top))


@block_code
def _unpack_q4_1(dst, src, n_blocks):
    x = carray(src, (n_blocks, 20))
    y = carray(dst, (n_blocks, 32))
    n = lanes(16)
    for b in range(n_blocks):
        d, low = half_at(x, b, 0), half_at(x, b, 2)
        for j in range(n):
            q = np.int32(x[b, 4 + j])
            y[b, j] = d * np.float32(q & np.int32(15)) + low
            y[b, 16 + j] = d * np.float32(q >> np.int32(4)) + low


@exact
def _pack_q4_1(dst, src):
    for b in range(src.shape[0]):
        per_level, low = _put_range(dst, b, src[b], 15)
        for j in range(16):
            first = _level((src[b, j] - low) * per_level, 15)
            second = _level((src[b, 16 + j] - low) * per_level, 15)
            dst[b, 4 + j] = np.uint8((first | (second << 4)) & 255)


Q4_1 = Quant(dtype=DTYPES["Q4_1"], unpack=_unpack_q4_1, pack=_pack_q4_1, limit=HALF_LIMIT)


@block_code
def _unpack_q5_1(dst, src, n_blocks):
    x = carray(src, (n_blocks, 24))
    y = carray(dst, (n_blocks, 32))
    n = lanes(16)
    for b in range(n_blocks):
        d, low = half_at(x, b, 0), half_at(x, b, 2)
        fifth = np.uint32(0)
        for i in range(4):
            fifth |= np.uint32(x[b, 4 + i]) << np.uint32(8 * i)
        for j in range(n):
            q = np.int32(x[b, 8 + j])
            top = fifth >> np.uint32(j)
            first = (q & np.int32(15)) | np.int32((top & np.uint32(1)) << np.uint32(4))
            top = fifth >> np.uint32(j + 12)  # bit j + 16, already where it belongs
            second = (q >> np.int32(4)) | np.int32(top & np.uint32(16))
            y[b, j] = d * np.float32(first) + low
            y[b, 16 + j] = d * np.float32(second) + low


@exact
def _pack_q5_1(dst, src):
    for b in range(src.shape[0]):
        per_level, low = _put_range(dst, b, src[b], 31)
        clear(dst[b, 4:8])
        for j in range(16):
            first = _level((src[b, j] - low) * per_level, 31)
            second = _level((src[b, 16 + j] - low) * per_level, 31)
            dst[b, 8 + j] = np.uint8((first & 15) | ((second & 15) << 4))
            dst[b, 4 + j // 8] |= np.uint8((first >> 4) << (j % 8))
            dst[b, 6 + j // 8] |= np.uint8((second >> 4) << (j % 8))


Q5_1 = Quant(dtype=DTYPES["Q5_1"], unpack=_unpack_q5_1, pack=_pack_q5_1, limit=HALF_LIMIT)
