"""bloom: BLOOM. ALiBi instead of positions, a norm after the embedding, biases everywhere."""

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.part import Part
from pyggml.ops import gelu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope=None, layer_norm=("weight", "bias"), fused_qkv=True)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, max_bias=8.0), b.plain(i, gelu))

    return b.decoder(block, prelude=b.norm("token_embd_norm"))


BLOOM = Architecture("bloom", _decoder, {})
