"""minimax-m2: MiniMax M2. Experts in every layer; norms of q and of k, each over all heads at
once."""

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.models.experts import read_experts, read_gating
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    experts = read_experts(r, b, swiglu, own_length=False, gating=read_gating(r), biased=True)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, **b.norms_of_all_heads(i)), experts[i])

    return b.decoder(block, tied=False)


MINIMAX_M2 = Architecture(
    "minimax-m2",
    _decoder,
    {"expert_count": 4, "expert_used_count": 2, "expert_gating_func": 2}
    | {"expert_feed_forward_length": 256},
)
