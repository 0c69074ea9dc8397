"""phi3: Phi 3 and 4. As qwen2, with q, k and v in one matrix and gate and up in another.

The file's sliding window is ignored, as in llama.cpp: its converter writes a wrong one.
"""

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.part import Part
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", fused_qkv=True)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i), b.gated_mlp(i, swiglu, fused=True))

    return b.decoder(block)


PHI3 = Architecture("phi3", _decoder, {})
