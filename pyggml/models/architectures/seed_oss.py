"""seed_oss: Seed OSS. As qwen2; the norm before the feed-forward is named post_attention_norm."""

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.block import Chain, residual
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.part import Part
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")

    def block(i: int) -> Part:
        return Chain(
            (
                residual(b.norm("attn_norm"), b.attention(i)),
                residual(b.norm("post_attention_norm"), b.gated_mlp(i, swiglu)),
            )
        )

    return b.decoder(block)


SEED_OSS = Architecture("seed_oss", _decoder, {})
