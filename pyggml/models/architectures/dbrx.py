"""dbrx: DBRX. Experts in every layer, layer norms without biases, clamped q, k and v."""

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.models.experts import read_experts
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", layer_norm=("weight",), fused_qkv=True)
    limit = r.number("attention.clamp_kqv", None, 0.0, 1e6)
    experts = read_experts(r, b, swiglu, own_length=False)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, clamp=limit), experts[i], second="attn_output_norm")

    return b.decoder(block, tied=False)


DBRX = Architecture(
    "dbrx", _decoder, {"attention.clamp_kqv": 2.0, "expert_count": 4, "expert_used_count": 2}
)
