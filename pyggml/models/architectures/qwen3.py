"""qwen3: as qwen2, without biases; every head of q and k gets an RMS norm before the rotation."""

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
        return b.pre_norm(b.attention(i, **b.head_norms(i)), b.gated(i, swiglu))

    return b.decoder(block)


QWEN3 = Architecture("qwen3", _decoder, {})
