"""smollm3: as llama, but every fourth layer has no rotary positions."""

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.part import Part
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal")

    def block(i: int) -> Part:
        here = {"rope": None} if i % 4 == 3 else {}
        return b.pre_norm(b.attention(i, **here), b.gated_mlp(i, swiglu))

    return b.decoder(block)


SMOLLM3 = Architecture("smollm3", _decoder, {"block_count": 4})
