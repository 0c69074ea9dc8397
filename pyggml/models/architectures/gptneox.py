"""gptneox: GPT-NeoX and Pythia. Attention and feed-forward are parallel; each has a norm.

The GELU is the tanh form, as in llama.cpp; the published models were trained with the exact one.
"""

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.ops import gelu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", layer_norm=("weight", "bias"), fused_qkv=True)
    parallel = r.flag("use_parallel_residual", True)

    def block(i: int) -> Part:
        attention, feed_forward = b.attention(i), b.plain(i, gelu)
        if parallel:
            return b.parallel(attention, feed_forward, ("attn_norm", "ffn_norm"))
        return b.pre_norm(attention, feed_forward)

    return b.decoder(block, tied=False)


GPTNEOX = Architecture("gptneox", _decoder, {"rope.dimension_count": 2})
