"""gpt-oss: experts with biases and clipped gates; attention with sinks; a window in every other
layer.

llama.cpp's softmax over the chosen experts' logits equals the softmax over all experts, divided by
the sum over the chosen. YaRN's corner dimensions are rounded to whole pairs, as in llama.cpp; the
published model does not round.
"""

from dataclasses import replace

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.block import Chain, residual
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.experts import read_experts
from pyggml.models.part import Part
from pyggml.ops import swiglu_oai


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    assert b.rope is not None
    local = replace(b.rope, freq_base=r.number("rope.freq_base_swa", b.rope.freq_base, 1.0, 1e12))
    window = r.count("attention.sliding_window")
    windowed = r.pattern(b.config.n_layer, 2)
    experts = read_experts(r, b, swiglu_oai, bias=True)

    def block(i: int) -> Part:
        here = {"rope": local, "window": window} if windowed[i] else {}
        return Chain(
            (
                residual(b.norm("attn_norm"), b.attention(i, sinks=True, **here)),
                residual(b.norm("post_attention_norm"), experts[i]),
            )
        )

    return b.decoder(block, tied=False)


GPT_OSS = Architecture(
    "gpt-oss",
    _decoder,
    {"attention.sliding_window": 8, "expert_count": 4, "expert_used_count": 2}
    | {"expert_feed_forward_length": 256},
)
