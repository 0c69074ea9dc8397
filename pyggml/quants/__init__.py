"""dequantize: a tensor's bytes → float32;  quantize: the reverse, with bytes equal to ggml's.

QUANTS has one declaration per weight type.
"""

from pyggml.quants.base import NoFit, NoPack, Quant
from pyggml.quants.registry import NUMBERS, QUANTS, quant
from pyggml.quants.unpack import UNPACK
from pyggml.quants.whole import dequantize, quantize

__all__ = [
    "NUMBERS", "QUANTS", "UNPACK", "NoFit", "NoPack", "Quant", "dequantize", "quant", "quantize",
]  # fmt: skip
