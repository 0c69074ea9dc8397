"""Blocks of 32 weights with a scale d and a minimum m, both float16:  x = d·q + m.

Q4_1   20 bytes: d, m, 16 × uint8; byte j holds q of weight j (low 4 bits) and j+16 (high)
Q5_1   24 bytes: d, m, uint32 of fifth bits (bit j: weight j), 16 bytes as Q4_1's
"""

import numpy as np

from pyggml.graph.dtypes import DTYPES
from pyggml.jit import exact
from pyggml.quants.base import Quant
from pyggml.quants.bits import clear, inverse, put_f16, truncate
from pyggml.quants.layout import Block
from pyggml.quants.packers.weighted import pack_q4_1, pack_q5_1


@exact
def _put_range(dst, b, x, top):
    """Write d and m of the block x; returns 1/d and m before their rounding to float16."""
    least = most = x[0]
    for v in x:
        least, most = min(least, v), max(most, v)
    d = (most - least) / np.float32(top)
    put_f16(dst, b, 0, d)
    put_f16(dst, b, 2, least)
    return inverse(d), least


@exact
def _level(v, top):
    """v ≥ 0 rounded to an integer, at most `top`."""
    return min(truncate(v + np.float32(0.5)), np.int32(top))


def _decode_q4_1(block: Block) -> None:
    block.add_minimum(block.f16(2))
    block.add(block.f16(0), block.nibbles(4))


@exact
def _pack_q4_1(dst, src):
    for b in range(src.shape[0]):
        per_level, minimum = _put_range(dst, b, src[b], 15)
        for j in range(16):
            first = _level((src[b, j] - minimum) * per_level, 15)
            second = _level((src[b, 16 + j] - minimum) * per_level, 15)
            dst[b, 4 + j] = np.uint8((first | (second << 4)) & 255)


Q4_1 = Quant(dtype=DTYPES["Q4_1"], decode=_decode_q4_1, pack=_pack_q4_1, fit=pack_q4_1)


def _decode_q5_1(block: Block) -> None:
    block.add_minimum(block.f16(2))
    block.add(block.f16(0), block.either(block.nibbles(8), block.flags(4, 16)))


@exact
def _pack_q5_1(dst, src):
    for b in range(src.shape[0]):
        per_level, minimum = _put_range(dst, b, src[b], 31)
        clear(dst[b, 4:8])
        for j in range(16):
            first = _level((src[b, j] - minimum) * per_level, 31)
            second = _level((src[b, 16 + j] - minimum) * per_level, 31)
            dst[b, 8 + j] = np.uint8((first & 15) | ((second & 15) << 4))
            dst[b, 4 + j // 8] |= np.uint8((first >> 4) << (j % 8))
            dst[b, 6 + j // 8] |= np.uint8((second >> 4) << (j % 8))


Q5_1 = Quant(dtype=DTYPES["Q5_1"], decode=_decode_q5_1, pack=_pack_q5_1, fit=pack_q5_1)
