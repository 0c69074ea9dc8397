"""step35: Step 3.5. A gate for each head of attention; layers with a window have a rotation and
heads of their own, the others rotate half as many numbers. Experts beside a shared one; whether a
layer is dense, its tensors say. Gates and ups are clipped."""

from dataclasses import replace

import numpy as np

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.attention import Attention, GatedOutput
from pyggml.models.basics import read_basics, read_windows
from pyggml.models.experts import (
    MIXTURE,
    SIGMOID,
    dense_without_router,
    read_feed_forward,
    read_router,
    read_shared_length,
)
from pyggml.models.feed_forward import read_clips
from pyggml.models.rope import read_local_rope


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox", own_turns=True)
    half = b.rotary.n_dims // 2
    windows = read_windows(r, b, 1, rope=read_local_rope(r, b.rotary, b.heads[0].size))
    of_experts, of_others = read_clips(r, b.config.n_layer)
    if half % 2:
        r.faults.append(f"rope.dimension_count is {2 * half}, wanted a multiple of 4")
    full = replace(b.rotary, n_dims=half - half % 2, n_factors=half)
    feed_forward = read_feed_forward(
        *(r, b, of_experts, read_shared_length(r), dense_without_router(r), of_others),
        **read_router(r, SIGMOID),
    )

    def block(i: int) -> Part:
        gated = not r.has_tensors or f"blk.{i}.attn_gate.weight" in r.shapes
        normed = not r.has_tensors or f"blk.{i}.attn_q_norm.weight" in r.shapes
        here = {"rope": full} | windows[i] | (b.head_norms(i) if normed else {})
        attention = b.attention(i, GatedOutput if gated else Attention, **here)
        return b.pre_norm(attention, feed_forward[i])

    return b.decoder(block, tied=False)


STEP35 = Architecture(
    "step35",
    _decoder,
    {
        "attention.head_count": np.array([4, 2], np.int32),
        "attention.head_count_kv": np.array([2, 1], np.int32),
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": np.array([False, True]),
        **MIXTURE,
        "expert_shared_feed_forward_length": 256,
        "leading_dense_block_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "swiglu_clamp_exp": 0.5,
        "swiglu_clamp_shexp": np.array([0.0, 0.4], np.float32),
        "rope.dimension_count": 4,
    },
)
