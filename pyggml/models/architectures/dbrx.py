"""dbrx: DBRX. Experts in every layer, layer norms without biases, clamped q, k and v."""

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.block import Chain, residual
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.experts import read_experts
from pyggml.models.part import Part
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", layer_norm=("weight",), fused_qkv=True)
    limit = r.number("attention.clamp_kqv", None, 0.0, 1e6)
    experts = read_experts(r, b, swiglu, own_length=False)

    def block(i: int) -> Part:
        return Chain(
            (
                residual(b.norm("attn_norm"), b.attention(i, clamp=limit)),
                residual(b.norm("attn_output_norm"), experts[i]),
            )
        )

    return b.decoder(block, tied=False)


DBRX = Architecture(
    "dbrx", _decoder, {"attention.clamp_kqv": 2.0, "expert_count": 4, "expert_used_count": 2}
)
