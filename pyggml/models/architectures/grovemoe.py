"""grovemoe: GroveMoE. As qwen3moe, with smaller experts for groups of experts."""

from pyggml.models.architecture import Architecture, Decoder, Reader
from pyggml.models.basics import read_basics
from pyggml.models.grove import read_groves
from pyggml.ops import sigmoid, swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    groves = read_groves(r, b, swiglu, sigmoid)

    return b.decoder(lambda i: b.pre_norm(b.attention(i, **b.head_norms(i)), groves[i]))


GROVEMOE = Architecture(
    "grovemoe",
    _decoder,
    {
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_feed_forward_length": 256,
        "expert_chunk_feed_forward_length": 128,
        "experts_per_group": 2,
        "expert_group_scale": 0.5,
    },
)
