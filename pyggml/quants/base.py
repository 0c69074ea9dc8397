"""What a weight type declares: how its blocks are decoded, and how they are packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyggml._jit import BlockCode
from pyggml.dtypes import DType
from pyggml.quants.layout import Decoder

# Up to here no half that is a scale overflows.
HALF_LIMIT = 60000.0

# pack(dst, src): src float32 (n_blocks, block), finite → dst uint8 (n_blocks, block_bytes).
Pack = Callable[[np.ndarray, np.ndarray], None]


@dataclass(frozen=True, slots=True)
class NoPack:
    """In place of `pack`: why tensors of this type are read but not written."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quant:
    """One tensor type.

    dtype   name, number, elements and bytes of a block
    decode  the decoder of a block, from which pyggml.quants.unpack and the products derive their
            code; or code(dst, src, n_blocks), which unpacks n_blocks consecutive blocks at src to
            n_blocks · block float32: products unpack such a type first
    pack    the reverse, equal byte for byte to ggml's `quantize_row_*_ref`, or why there is none
    limit   magnitudes up to here are packed without overflow; above it the result is looked at

    Blocks of plain types (F32, F16, BF16) hold one element.
    """

    dtype: DType
    decode: Decoder | BlockCode
    pack: Pack | NoPack
    limit: float
