"""qwen35: Qwen 3.5. Three blocks of four mix tokens by a gated delta net, the fourth by attention
whose result is gated."""

from __future__ import annotations

import numpy as np

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.block import Chain, residual
from pyggml.models.config import Reader, rms_eps
from pyggml.models.decoder import Decoder
from pyggml.models.delta_net import GatedAttention, is_recurrent, read_delta_net
from pyggml.models.part import Part
from pyggml.ops import swiglu


def _check_sections(r: Reader, n_pairs: int) -> None:
    """A pair turns by its token's time, height or width, in turns. Text has the same number for all
    three, so that the sections do not matter as long as every pair has one of these."""
    sections = r.counts("rope.dimension_sections", 4, least=0, most=1 << 12)
    if any(i >= 3 * sections[i % 3] for i in range(n_pairs)):
        r.faults.append(
            f"rope.dimension_sections are {sections}, wanted time, height or width for each of "
            f"{n_pairs} pairs"
        )


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    assert b.rope is not None
    _check_sections(r, b.rope.n_dims // 2)
    delta = read_delta_net(r, b.config.n_embd, rms_eps(r), grouped=False)
    recurrent = is_recurrent(r, b.config)

    def block(i: int) -> Part:
        mixer = delta if recurrent[i] else b.attention(i, GatedAttention, **b.head_norms(i))
        return Chain(
            (
                residual(b.norm("attn_norm"), mixer),
                residual(b.norm("post_attention_norm"), b.gated(i, swiglu)),
            )
        )

    return b.decoder(block)


QWEN35 = Architecture(
    "qwen35",
    _decoder,
    {
        "attention.recurrent_layers": np.array([True, False]),
        "rope.dimension_count": 4,
        "rope.dimension_sections": np.array([1, 1, 1, 0], np.int32),
        "ssm.conv_kernel": 4,
        "ssm.group_count": 2,
        "ssm.inner_size": 64,
        "ssm.state_size": 16,
        "ssm.time_step_rank": 4,
    },
)
