"""glm4 (GLM 4, 0414) and glm4moe (GLM 4.5 and 4.6). Rotary positions on half of a head.

glm4     four norms in a block; gate and up in one matrix. Multimodal files rotate time, height and
         width separately; they are refused
glm4moe  experts beside a shared one in all layers but the first few; norms of each head of q and k
         if the file has them. Text of multimodal files is as of others
"""

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.models.experts import (
    EXAMPLE,
    SIGMOID,
    read_counted_length,
    read_feed_forward,
    read_router,
)
from pyggml.models.rope import check_sections
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal")
    time, height, *_ = r.counts("rope.dimension_sections", 4, (0,) * 4, least=0, most=1 << 12)
    if time and height:
        r.faults.append(
            f"glm4.rope.dimension_sections begin with {time} and {height}, wanted a model of text "
            "alone, which has none"
        )

    return b.decoder(lambda i: b.sandwich_norms(b.attention(i), b.gated_mlp(i, swiglu, fused=True)))


def _with_experts(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    if any(r.counts("rope.dimension_sections", 4, (0,) * 4, least=0, most=1 << 12)):
        check_sections(r, b.rotary)
    router = read_router(r, SIGMOID) | {"biased": True}
    feed_forward = read_feed_forward(r, b, swiglu, read_counted_length(r), **router)

    def block(i: int) -> Part:
        norms = b.head_norms(i) if f"blk.{i}.attn_q_norm.weight" in r.shapes else {}
        return b.pre_norm(b.attention(i, **norms), feed_forward[i], second="post_attention_norm")

    return b.decoder(block)


GLM4 = Architecture("glm4", _decoder, {"rope.dimension_count": 2})
GLM4MOE = Architecture("glm4moe", _with_experts, EXAMPLE | {"rope.dimension_count": 2})
