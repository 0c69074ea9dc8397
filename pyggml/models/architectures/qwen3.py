"""qwen3 and qwen3moe. As qwen2, without biases and with an RMS norm of each head of q and k before
rope. qwen3moe has experts in every layer."""

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.experts import read_experts
from pyggml.models.part import Part
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, **b.head_norms(i)), b.gated_mlp(i, swiglu))

    return b.decoder(block)


def _with_experts(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    experts = read_experts(r, b, swiglu)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, **b.head_norms(i)), experts[i])

    return b.decoder(block)


QWEN3 = Architecture("qwen3", _decoder, {})
QWEN3MOE = Architecture(
    "qwen3moe",
    _with_experts,
    {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256},
)
