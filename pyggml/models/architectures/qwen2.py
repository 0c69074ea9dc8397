"""qwen2: Qwen 2 and 2.5. Biases on q, k and v; rotary pairs are halves apart (i, i + d/2)."""

from __future__ import annotations

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.part import Part
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i), b.gated(i, swiglu))

    return b.decoder(block)


QWEN2 = Architecture("qwen2", _decoder, {})
