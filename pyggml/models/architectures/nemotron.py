"""nemotron: Nemotron 3 and 4, Minitron. Layer norms; the feed-forward squares what relu leaves.

The file's norm weights already have the 1 that the published ones lack.
"""

from __future__ import annotations

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
