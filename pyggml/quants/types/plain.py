"""Types without blocks: a block is one element.

F32    4 bytes
F16    2 bytes, a float16
BF16   2 bytes, a bfloat16: the upper 16 bits of a float32
"""

import math

import numpy as np

from pyggml.graph.dtypes import DTYPES
from pyggml.quants.base import BY_ITSELF, Quant
from pyggml.quants.layout import Block


def _decode_f32(block: Block) -> None:
    for i, n in block.pieces():
        block.add_floats(block.f32(4 * i, n), i)


def _pack_f32(dst: np.ndarray, src: np.ndarray) -> None:
    dst[:] = src.view(np.uint8)


F32 = Quant(dtype=DTYPES["F32"], decode=_decode_f32, pack=_pack_f32, fit=BY_ITSELF, limit=math.inf)


def _decode_f16(block: Block) -> None:
    for i, n in block.pieces():
        block.add_floats(block.f16(2 * i, n), i)


def _pack_f16(dst: np.ndarray, src: np.ndarray) -> None:
    dst[:] = src.astype(np.float16).view(np.uint8)


F16 = Quant(dtype=DTYPES["F16"], decode=_decode_f16, pack=_pack_f16, fit=BY_ITSELF)


def _decode_bf16(block: Block) -> None:
    for i, n in block.pieces():
        block.add_floats(block.bf16(2 * i, n), i)


def _pack_bf16(dst: np.ndarray, src: np.ndarray) -> None:
    bits = src.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)  # ties to even
    dst[:] = rounded.astype(np.uint16).view(np.uint8)


BF16 = Quant(dtype=DTYPES["BF16"], decode=_decode_bf16, pack=_pack_bf16, fit=BY_ITSELF)
