"""stablelm: StableLM 3B and StableLM 2.

Attention and feed-forward are parallel if the file has no ffn_norm, as in llama.cpp; the key
use_parallel_residual is ignored. The 12B has norms of q and k, with a weight for each head.
"""

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", layer_norm=("weight", "bias"))

    def block(i: int) -> Part:
        attention = b.attention(i, **b.norms_of_each_head(r, i))
        if f"blk.{i}.ffn_norm.weight" in r.shapes:
            return b.pre_norm(attention, b.gated_mlp(i, swiglu))
        return b.parallel(attention, b.gated_mlp(i, swiglu))

    return b.decoder(block, tied=False)


STABLELM = Architecture("stablelm", _decoder, {"rope.dimension_count": 2})
