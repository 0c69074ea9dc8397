"""phi3: Phi 3 and 4. As qwen2, with q, k and v in one matrix and gate and up in another.

The sliding window that files name is not used, as in llama.cpp, whose converter gets it wrong.
"""

from __future__ import annotations

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.part import Part
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", packed=True)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i), b.gated(i, swiglu, packed=True))

    return b.decoder(block)


PHI3 = Architecture("phi3", _decoder, {})
