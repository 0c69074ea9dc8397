"""Blocks of 32 weights with one scale d, a half:  x = d·q.

Q8_0   34 bytes: d, 32 × int8 q
Q8_1   36 bytes: d, a half with d·Σq, 32 × int8 q; ggml's form of activations
Q4_0   18 bytes: d, 16 × uint8; byte j holds q+8 of weight j (low 4 bits) and j+16 (high)
Q5_0   22 bytes: d, uint32 of fifth bits (bit j: weight j), 16 bytes as Q4_0 with q+16
"""

from __future__ import annotations

import numpy as np

from pyggml._jit import block_code, carray, exact
from pyggml.dtypes import DTYPES
from pyggml.quants.base import HALF_LIMIT, Quant
from pyggml.quants.bits import (
    clear,
    extreme,
    half_at,
    inverse,
    lanes,
    put_half,
    round_away,
    truncate,
)


@block_code
def _unpack_q8_0(dst, src, n_blocks):
    x = carray(src, (n_blocks, 34))
    q = x.view(np.int8)
    y = carray(dst, (n_blocks, 32))
    n = lanes(32)
    for b in range(n_blocks):
        d = half_at(x, b, 0)
        for j in range(n):
            y[b, j] = d * np.float32(q[b, 2 + j])


@exact
def _pack_q8_0(dst, src):
    for b in range(src.shape[0]):
        d = abs(extreme(src[b])) / np.float32(127)
        per_level = inverse(d)
        put_half(dst, b, 0, d)
        for j in range(32):
            dst[b, 2 + j] = np.uint8(round_away(src[b, j] * per_level) & 255)


Q8_0 = Quant(dtype=DTYPES["Q8_0"], unpack=_unpack_q8_0, pack=_pack_q8_0, limit=HALF_LIMIT)


@block_code
def _unpack_q8_1(dst, src, n_blocks):
    x = carray(src, (n_blocks, 36))
    q = x.view(np.int8)
    y = carray(dst, (n_blocks, 32))
    n = lanes(32)
    for b in range(n_blocks):
        d = half_at(x, b, 0)
        for j in range(n):
            y[b, j] = d * np.float32(q[b, 4 + j])


@exact
def _pack_q8_1(dst, src):
    for b in range(src.shape[0]):
        d = abs(extreme(src[b])) / np.float32(127)
        per_level = inverse(d)
        put_half(dst, b, 0, d)
        total = np.int32(0)
        for j in range(32):
            q = round_away(src[b, j] * per_level)
            dst[b, 4 + j] = np.uint8(q & 255)
            total += q
        put_half(dst, b, 2, np.float32(total) * d)


Q8_1 = Quant(dtype=DTYPES["Q8_1"], unpack=_unpack_q8_1, pack=_pack_q8_1, limit=HALF_LIMIT)


@block_code
def _unpack_q4_0(dst, src, n_blocks):
    x = carray(src, (n_blocks, 18))
    y = carray(dst, (n_blocks, 32))
    n = lanes(16)
    for b in range(n_blocks):
        d = half_at(x, b, 0)
        for j in range(n):
            q = np.int32(x[b, 2 + j])
            y[b, j] = d * np.float32((q & np.int32(15)) - np.int32(8))
            y[b, 16 + j] = d * np.float32((q >> np.int32(4)) - np.int32(8))


@exact
def _level(v, half):
    """The level of v = x/d in 0 … 2·half − 1, where level half stands for 0."""
    return min(truncate(v + (np.float32(half) + np.float32(0.5))), np.int32(2 * half - 1))


@exact
def _pack_q4_0(dst, src):
    for b in range(src.shape[0]):
        d = extreme(src[b]) / np.float32(-8)  # the extreme weight becomes level 0, exactly
        per_level = inverse(d)
        put_half(dst, b, 0, d)
        for j in range(16):
            low = _level(src[b, j] * per_level, 8)
            high = _level(src[b, 16 + j] * per_level, 8)
            dst[b, 2 + j] = np.uint8((low | (high << 4)) & 255)


Q4_0 = Quant(dtype=DTYPES["Q4_0"], unpack=_unpack_q4_0, pack=_pack_q4_0, limit=HALF_LIMIT)


@exact
def _fifth_bits(x, b):
    bits = np.uint32(0)
    for i in range(4):
        bits |= np.uint32(x[b, 2 + i]) << np.uint32(8 * i)
    return bits


@block_code
def _unpack_q5_0(dst, src, n_blocks):
    x = carray(src, (n_blocks, 22))
    y = carray(dst, (n_blocks, 32))
    n = lanes(16)
    for b in range(n_blocks):
        d = half_at(x, b, 0)
        fifth = _fifth_bits(x, b)
        for j in range(n):
            q = np.int32(x[b, 6 + j])
            low = (q & np.int32(15)) | np.int32(((fifth >> np.uint32(j)) & np.uint32(1)) << 4)
            high = (q >> np.int32(4)) | np.int32(((fifth >> np.uint32(j + 16)) & np.uint32(1)) << 4)
            y[b, j] = d * np.float32(low - np.int32(16))
            y[b, 16 + j] = d * np.float32(high - np.int32(16))


@exact
def _pack_q5_0(dst, src):
    for b in range(src.shape[0]):
        d = extreme(src[b]) / np.float32(-16)
        per_level = inverse(d)
        put_half(dst, b, 0, d)
        clear(dst[b, 2:6])
        for j in range(16):
            low = _level(src[b, j] * per_level, 16)
            high = _level(src[b, 16 + j] * per_level, 16)
            dst[b, 6 + j] = np.uint8((low & 15) | ((high & 15) << 4))
            dst[b, 2 + j // 8] |= np.uint8((low >> 4) << (j % 8))
            dst[b, 4 + j // 8] |= np.uint8((high >> 4) << (j % 8))


Q5_0 = Quant(dtype=DTYPES["Q5_0"], unpack=_unpack_q5_0, pack=_pack_q5_0, limit=HALF_LIMIT)
