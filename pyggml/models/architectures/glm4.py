"""glm4: GLM 4 (0414). Four norms in a block; gate and up in one matrix; rotary positions on half of
a head.

Multimodal files rotate time, height and width separately; they are refused.
"""

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.part import Part
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal")
    time, height, *_ = r.counts("rope.dimension_sections", 4, (0,) * 4, least=0, most=1 << 12)
    if time and height:
        r.faults.append(
            f"glm4.rope.dimension_sections begin with {time} and {height}, wanted a model of text "
            "alone, which has none"
        )

    def block(i: int) -> Part:
        return b.sandwich_norms(b.attention(i), b.gated_mlp(i, swiglu, fused=True))

    return b.decoder(block)


GLM4 = Architecture("glm4", _decoder, {"rope.dimension_count": 2})
