"""falcon: Falcon 7B and 40B. Attention and feed-forward are parallel; in the 40B each has a norm.

The GELU is the tanh form, as in llama.cpp; the published models were trained with the exact one.
"""

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.ops import gelu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", layer_norm=("weight", "bias"), fused_qkv=True)

    def block(i: int) -> Part:
        own = "attn_norm_2" if f"blk.{i}.attn_norm_2.weight" in r.shapes else "attn_norm"
        return b.parallel(b.attention(i), b.plain(i, gelu), (own, "attn_norm"))

    return b.decoder(block)


FALCON = Architecture("falcon", _decoder, {})
