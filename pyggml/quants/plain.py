"""Types without blocks: a block is one element.

F32    4 bytes
F16    2 bytes, a half
BF16   2 bytes, the upper half of a float
"""

from __future__ import annotations

import math

import numpy as np

from pyggml._jit import block_code, carray
from pyggml.dtypes import DTYPES
from pyggml.quants.base import HALF_LIMIT, Quant
from pyggml.quants.bits import bfloat_to_float, half_to_float


@block_code
def _unpack_f32(dst, src, n_blocks):
    x = carray(src, 4 * n_blocks).view(np.uint32)
    y = carray(dst, n_blocks).view(np.uint32)  # bits, so that NaN payloads stay
    for i in range(n_blocks):
        y[i] = x[i]


def _pack_f32(dst: np.ndarray, src: np.ndarray) -> None:
    dst[:] = src.view(np.uint8)


F32 = Quant(dtype=DTYPES["F32"], unpack=_unpack_f32, pack=_pack_f32, limit=math.inf)


@block_code
def _unpack_f16(dst, src, n_blocks):
    x = carray(src, 2 * n_blocks).view(np.uint16)
    y = carray(dst, n_blocks)
    for i in range(n_blocks):
        y[i] = half_to_float(x[i])


def _pack_f16(dst: np.ndarray, src: np.ndarray) -> None:
    dst[:] = src.astype(np.float16).view(np.uint8)


F16 = Quant(dtype=DTYPES["F16"], unpack=_unpack_f16, pack=_pack_f16, limit=HALF_LIMIT)


@block_code
def _unpack_bf16(dst, src, n_blocks):
    x = carray(src, 2 * n_blocks).view(np.uint16)
    y = carray(dst, n_blocks)
    for i in range(n_blocks):
        y[i] = bfloat_to_float(x[i])


def _pack_bf16(dst: np.ndarray, src: np.ndarray) -> None:
    bits = src.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)  # ties to even
    dst[:] = rounded.astype(np.uint16).view(np.uint8)


BF16 = Quant(dtype=DTYPES["BF16"], unpack=_unpack_bf16, pack=_pack_bf16, limit=HALF_LIMIT)
