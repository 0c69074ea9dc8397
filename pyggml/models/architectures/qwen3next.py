"""qwen3next (Qwen 3 Next), qwen35 and qwen35moe (Qwen 3.5). The mixer of three blocks in four is a
gated delta net, of the fourth gated attention. All but qwen35 have experts and a gated shared
expert."""

from functools import partial

import numpy as np

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import Basics, read_basics
from pyggml.models.block import Sum
from pyggml.models.config import rms_eps
from pyggml.models.delta_net import GatedAttention, is_recurrent, read_delta_net
from pyggml.models.experts import MIXTURE, GatedPart, read_experts, read_shared
from pyggml.models.rope import check_sections
from pyggml.ops import swiglu


def _decoder(r: Reader, grouped: bool, mixed: bool) -> Decoder:
    """grouped: see DeltaNet. mixed: with experts."""
    b = read_basics(r, rope="neox")
    if not grouped:
        check_sections(r, b.rotary, interleaved=True)
    delta = read_delta_net(r, b.config.n_embd, rms_eps(r), grouped)
    recurrent = is_recurrent(r, b.config)
    feed_forward = _experts(r, b) if mixed else [b.gated_mlp(i, swiglu) for i in range(len(b.n_ff))]

    def block(i: int) -> Part:
        mixer = delta if recurrent[i] else b.attention(i, GatedAttention, **b.head_norms(i))
        return b.pre_norm(mixer, feed_forward[i], second="post_attention_norm")

    return b.decoder(block)


def _experts(r: Reader, b: Basics) -> list[Part]:
    shared = read_shared(r, b, swiglu, b.n_ff[0])
    assert shared is not None, "its length is the layer's if the file has none"
    gated = GatedPart(shared, b.config.n_embd)
    return [Sum((experts, gated)) for experts in read_experts(r, b, swiglu)]


_DELTA: dict[str, object] = {
    "attention.recurrent_layers": np.array([True, False]),
    "rope.dimension_count": 4,
    "ssm.conv_kernel": 4,
    "ssm.group_count": 2,
    "ssm.inner_size": 64,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
}
_SECTIONS: dict[str, object] = {"rope.dimension_sections": np.array([1, 1, 1, 0], np.int32)}
_EXPERTS: dict[str, object] = MIXTURE | {"expert_shared_feed_forward_length": 256}
QWEN3NEXT = Architecture(
    "qwen3next", partial(_decoder, grouped=True, mixed=True), _DELTA | _EXPERTS
)
QWEN35 = Architecture("qwen35", partial(_decoder, grouped=False, mixed=False), _DELTA | _SECTIONS)
QWEN35MOE = Architecture(
    "qwen35moe", partial(_decoder, grouped=False, mixed=True), _DELTA | _SECTIONS | _EXPERTS
)
