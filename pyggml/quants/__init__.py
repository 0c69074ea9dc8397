"""dequantize: the bytes of a tensor → float32;  quantize: the reverse, with ggml's own bytes.

QUANTS has one declaration per weight type, `mix` says which tensor gets which type in a file.
"""

from __future__ import annotations

from pyggml.quants.base import NoPack, Quant
from pyggml.quants.file_types import FILE_TYPES, FileType
from pyggml.quants.mix import ModelFacts, is_packed, mix
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
    "quant",
    "quantize",
]
