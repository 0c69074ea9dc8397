"""starcoder2: StarCoder 2. Layer norms, biases everywhere, a feed-forward without a gate."""

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.part import Part
from pyggml.ops import gelu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", layer_norm=("weight", "bias"))

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i), b.plain(i, gelu))

    return b.decoder(block)


STARCODER2 = Architecture("starcoder2", _decoder, {})
