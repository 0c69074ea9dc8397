"""dequantize: a tensor's bytes → float32;  quantize: the reverse, with bytes equal to ggml's.

QUANTS has one declaration per weight type. `mix` chooses the type of each tensor of a file.
"""

from __future__ import annotations

from pyggml.quants.base import NoPack, Quant
from pyggml.quants.file_types import FILE_TYPES, FileType, ModelFacts
from pyggml.quants.mix import is_packed, mix, needs_importance
from pyggml.quants.registry import NUMBERS, QUANTS, quant
from pyggml.quants.unpack import UNPACK
from pyggml.quants.whole import dequantize, quantize

__all__ = [
    "FILE_TYPES",
    "NUMBERS",
    "QUANTS",
    "UNPACK",
    "FileType",
    "ModelFacts",
    "NoPack",
    "Quant",
    "dequantize",
    "is_packed",
    "mix",
    "needs_importance",
    "quant",
    "quantize",
]
