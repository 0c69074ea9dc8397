"""seed_oss: Seed OSS. As qwen2; the norm before the feed-forward is named post_attention_norm."""

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i), b.gated_mlp(i, swiglu), second="post_attention_norm")

    return b.decoder(block)


SEED_OSS = Architecture("seed_oss", _decoder, {})
