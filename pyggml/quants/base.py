"""The declaration of a weight type: how its blocks are decoded and packed."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyggml.graph.dtypes import DType
from pyggml.quants.layout import Decoder

# Weights up to this magnitude overflow no float16 scale.
F16_LIMIT = 60000.0

# pack(dst, src): src float32 (n_blocks, block), finite → dst uint8 (n_blocks, block_bytes).
Pack = Callable[[np.ndarray, np.ndarray], None]


# pack(dst, src, importance, means): importance float32 (n_blocks, block), how much the columns of
# each weight count, means float32 (n_blocks,), the mean of x² over each block's row.
PackWeighted = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]


@dataclass(frozen=True, slots=True)
class NoPack:
    """A declared lack of `pack`, for `reason`: tensors of this type are read but not written, or
    written by importance alone."""

    reason: str


@dataclass(frozen=True, slots=True)
class NoFit:
    """A declared lack of `fit`, for `reason`: importance changes nothing in this type."""

    reason: str


BY_ITSELF = NoFit("each weight is rounded by itself")
BY_LARGEST = NoFit("scales follow from the largest weights, as in ggml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quant:
    """One weight type.

    dtype   name, number, elements and bytes of a block; a block of a plain type (F32, F16, BF16)
            has one element
    decode  the decoder of a block; pyggml.quants.unpack and the products derive their code from it
    pack    float32 → blocks, with bytes equal to those of ggml's `quantize_row_*_ref`; or NoPack
    fit     the packer by importance, with ggml's bytes (pyggml.quants.packers.weighted); or NoFit
    limit   weights up to this magnitude are packed without overflow; above it the result is checked
    direct  whether the CPU's products of many rows, and those of few in floats, read its blocks as
            they lie; those of other types unpack them first, and are made of floats. In integers,
            and on a card, products of few rows take every type as it lies
    """

    dtype: DType
    decode: Decoder
    pack: Pack | NoPack
    fit: PackWeighted | NoFit
    limit: float = F16_LIMIT
    direct: bool = True
