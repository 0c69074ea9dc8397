"""Blocks of 32 weights with one scale d, a float16:  x = d·q.

Q8_0   34 bytes: d, 32 × int8 q
Q8_1   36 bytes: d, d·Σq (float16), 32 × int8 q; ggml's type for activations
Q4_0   18 bytes: d, 16 × uint8; byte j holds q+8 of weight j (low 4 bits) and j+16 (high)
Q5_0   22 bytes: d, uint32 of fifth bits (bit j: weight j), 16 bytes as Q4_0 with q+16
"""

import numpy as np

from pyggml.graph.dtypes import DTYPES
from pyggml.jit import exact
from pyggml.quants.base import BY_LARGEST, Quant
from pyggml.quants.bits import clear, extreme, inverse, put_f16, round_away, truncate
from pyggml.quants.layout import Block
from pyggml.quants.packers.weighted import pack_q4_0, pack_q5_0


def _decode_q8_0(block: Block) -> None:
    block.add(block.f16(0), block.bytes(2))


@exact
def pack_q8_0(dst, src):
    for b in range(src.shape[0]):
        d = abs(extreme(src[b])) / np.float32(127)
        per_level = inverse(d)
        put_f16(dst, b, 0, d)
        for j in range(32):
            dst[b, 2 + j] = np.uint8(round_away(src[b, j] * per_level) & 255)


Q8_0 = Quant(dtype=DTYPES["Q8_0"], decode=_decode_q8_0, pack=pack_q8_0, fit=BY_LARGEST)


def _decode_q8_1(block: Block) -> None:
    block.add(block.f16(0), block.bytes(4))


@exact
def _pack_q8_1(dst, src):
    for b in range(src.shape[0]):
        d = abs(extreme(src[b])) / np.float32(127)
        per_level = inverse(d)
        put_f16(dst, b, 0, d)
        total = np.int32(0)
        for j in range(32):
            q = round_away(src[b, j] * per_level)
            dst[b, 4 + j] = np.uint8(q & 255)
            total += q
        put_f16(dst, b, 2, np.float32(total) * d)


Q8_1 = Quant(
    dtype=DTYPES["Q8_1"], decode=_decode_q8_1, pack=_pack_q8_1, fit=BY_LARGEST, direct=False
)


def _decode_q4_0(block: Block) -> None:
    block.add(block.f16(0), block.minus(block.nibbles(2), 8))


@exact
def _level(v, zero):
    """The level of v = x/d, in 0 … 2·zero − 1; level `zero` means 0."""
    return min(truncate(v + (np.float32(zero) + np.float32(0.5))), np.int32(2 * zero - 1))


@exact
def _pack_q4_0(dst, src):
    for b in range(src.shape[0]):
        d = extreme(src[b]) / np.float32(-8)  # the extreme weight becomes level 0, exactly
        per_level = inverse(d)
        put_f16(dst, b, 0, d)
        for j in range(16):
            low = _level(src[b, j] * per_level, 8)
            high = _level(src[b, 16 + j] * per_level, 8)
            dst[b, 2 + j] = np.uint8((low | (high << 4)) & 255)


Q4_0 = Quant(dtype=DTYPES["Q4_0"], decode=_decode_q4_0, pack=_pack_q4_0, fit=pack_q4_0)


def _decode_q5_0(block: Block) -> None:
    q = block.either(block.nibbles(6), block.flags(2, 16))
    block.add(block.f16(0), block.minus(q, 16))


@exact
def _pack_q5_0(dst, src):
    for b in range(src.shape[0]):
        d = extreme(src[b]) / np.float32(-16)
        per_level = inverse(d)
        put_f16(dst, b, 0, d)
        clear(dst[b, 2:6])
        for j in range(16):
            low = _level(src[b, j] * per_level, 16)
            high = _level(src[b, 16 + j] * per_level, 16)
            dst[b, 6 + j] = np.uint8((low & 15) | ((high & 15) << 4))
            dst[b, 2 + j // 8] |= np.uint8((low >> 4) << (j % 8))
            dst[b, 4 + j // 8] |= np.uint8((high >> 4) << (j % 8))


Q5_0 = Quant(dtype=DTYPES["Q5_0"], decode=_decode_q5_0, pack=_pack_q5_0, fit=pack_q5_0)
