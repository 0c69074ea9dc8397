"""arcee: as llama, with a squared ReLU instead of a gate."""

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.part import Part
from pyggml.ops import relu, sqr


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal")

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i), b.plain(i, lambda x: sqr(relu(x))))

    return b.decoder(block)


ARCEE = Architecture("arcee", _decoder, {})
