"""nemotron: Nemotron 3 and 4, Minitron. Layer norms; the feed-forward's activation is relu².

A norm weight in a file is the published one plus 1.
"""

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.part import Part
from pyggml.ops import relu, sqr


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", layer_norm=("weight", "bias"))

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i), b.plain(i, lambda x: sqr(relu(x))))

    return b.decoder(block, tied=False)


NEMOTRON = Architecture("nemotron", _decoder, {"rope.dimension_count": 2})
