"""bitnet: BitNet b1.58. As llama, with a norm more before each of attn_output and ffn_down, and a
scale beside each matrix."""

from dataclasses import replace

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.models.norm import RmsNorm
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    eps = b.norm("").eps

    def block(i: int) -> Part:
        attention = b.attention(i, out_norm=b.norm("attn_sub_norm"))
        norm = RmsNorm("ffn_sub_norm", b.n_ff[i], eps)
        return b.pre_norm(attention, replace(b.gated_mlp(i, swiglu), norm=norm))

    return b.decoder(block)


BITNET = Architecture("bitnet", _decoder, {})
