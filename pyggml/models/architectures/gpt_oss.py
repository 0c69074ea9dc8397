"""gpt-oss: experts with biases and clipped gates; attention with sinks; a window in every other
layer.

llama.cpp's softmax over the chosen experts' logits equals the softmax over all experts, divided by
the sum over the chosen. YaRN's corner dimensions are rounded to whole pairs, as in llama.cpp; the
published model does not round.
"""

from dataclasses import replace

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics, read_windows
from pyggml.models.experts import read_experts
from pyggml.ops import swiglu_oai


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    local = replace(
        b.rotary, freq_base=r.number("rope.freq_base_swa", b.rotary.freq_base, 1.0, 1e12)
    )
    windows = read_windows(r, b, 2, rope=local)
    experts = read_experts(r, b, swiglu_oai, bias=True)

    def block(i: int) -> Part:
        attention = b.attention(i, sinks=True, **windows[i])
        return b.pre_norm(attention, experts[i], second="post_attention_norm")

    return b.decoder(block, tied=False)


GPT_OSS = Architecture(
    "gpt-oss",
    _decoder,
    {"attention.sliding_window": 8, "expert_count": 4, "expert_used_count": 2}
    | {"expert_feed_forward_length": 256},
)
