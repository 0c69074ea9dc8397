"""bailingmoe3 (Ling 3): Kimi's delta attention, and in layers whose head_count_kv is not 0 latent
attention with a gate of each head; after the first layers, experts beside a shared one. Rotary
pairs of files with sections, whose text it is, are those of "neox"."""

from dataclasses import replace

import numpy as np

from pyggml.models.architecture import Architecture
from pyggml.models.architectures.deepseek2 import EXPERTS, LATENT
from pyggml.models.basics import Basics, read_basics
from pyggml.models.block import Sum
from pyggml.models.config import Reader, rms_eps
from pyggml.models.decoder import Decoder
from pyggml.models.delta_net import KimiDelta
from pyggml.models.experts import read_experts, read_router
from pyggml.models.feed_forward import GatedFeedForward, clipped_silu
from pyggml.models.latent import read_absorbed
from pyggml.models.part import Part
from pyggml.models.rope import check_sections


def _decoder(r: Reader) -> Decoder:
    time, height, *_ = r.counts("rope.dimension_sections", 4, (0,) * 4, least=0, most=1 << 12)
    by_sections = bool(time and height)
    mode = "neox" if by_sections else "normal"
    b = read_basics(r, rope=mode, own_values=True, least_heads=0)
    if by_sections and b.rope:
        check_sections(r, b.rope)
    if not r.flag("kda.safe_gate", True):
        r.faults.append("bailingmoe3.kda.safe_gate is False, wanted True")
    delta = KimiDelta(
        n_embd=b.config.n_embd,
        n_head=b.heads[0].n,
        size=r.count("kda.head_dim", most=1 << 12),
        width=r.count("ssm.conv_kernel", least=2, most=64),
        eps=rms_eps(r),
        low_rank=False,
        least=r.number("kda.gate_lower_bound", None, -1e3, -1e-6),
    )
    q_rank = r.count("attention.q_lora_rank", 0, least=0, most=1 << 14)
    latent = read_absorbed(r, b, q_rank=q_rank, gated=True)
    feed_forward = _feed_forward(r, b)

    def block(i: int) -> Part:
        return b.pre_norm(latent if b.heads[i].n_kv else delta, feed_forward[i])

    return b.decoder(block, adapts_output=False)


def _feed_forward(r: Reader, b: Basics) -> tuple[Part, ...]:
    c, n_dense = b.config, r.count("leading_dense_block_count", least=0, most=1024)
    n_ff = r.count("expert_feed_forward_length", most=1 << 20)
    n_shared = r.count("expert_shared_count", least=0, most=64)
    own = r.count("expert_shared_feed_forward_length", 0, least=0, most=1 << 20)
    of_experts, of_others = (
        tuple(map(clipped_silu, r.numbers(key, c.n_blocks, 0.0, 0.0, 1e6)))
        for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp")
    )
    experts = read_experts(r, b, of_experts[0], **read_router(r) | {"biased": True})

    def part(i: int) -> Part:
        if i < n_dense:
            return b.gated_mlp(i, of_others[i])
        length = own or n_ff * max(1, n_shared)
        shared = GatedFeedForward(c.n_embd, length, of_others[i], suffix="_shexp")
        return Sum((replace(experts[i], unit=of_experts[i]), shared))

    return tuple(part(i) for i in range(c.n_layer))


BAILINGMOE3 = Architecture(
    "bailingmoe3",
    _decoder,
    EXPERTS
    | LATENT
    | {
        "attention.head_count_kv": np.array([0, 1], np.int32),
        "expert_gating_func": 2,
        "kda.gate_lower_bound": -5.0,
        "kda.head_dim": 8,
        "ssm.conv_kernel": 4,
    },
)
