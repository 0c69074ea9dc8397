"""plamo: PLaMo 13B. Attention and feed-forward are parallel, with one norm."""

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.part import Part
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")

    def block(i: int) -> Part:
        return b.parallel(b.attention(i), b.gated_mlp(i, swiglu))

    return b.decoder(block, tied=False)


PLAMO = Architecture("plamo", _decoder, {})
