"""llama: Llama 1 to 3, Mistral, and Mixtral with experts. Rotary pairs are (2i, 2i + 1)."""

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.models.experts import has_experts, read_experts
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal")
    experts = read_experts(r, b, swiglu, own_length=False) if has_experts(r) else None

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i), experts[i] if experts else b.gated_mlp(i, swiglu))

    return b.decoder(block)


LLAMA = Architecture("llama", _decoder, {})
