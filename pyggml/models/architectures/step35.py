"""step35: Step 3.5. A gate for each head of attention; layers with a window have a rotation and
heads of their own, the others rotate half as many numbers. Experts beside a shared one; whether a
layer is dense, its tensors say. Gates and ups are clipped."""

from dataclasses import replace

import numpy as np

from pyggml.models.architecture import Architecture
from pyggml.models.attention import Attention, GatedOutput
from pyggml.models.basics import read_basics, read_windows
from pyggml.models.block import Sum
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.experts import (
    SIGMOID,
    dense_without_router,
    read_experts,
    read_router,
    read_shared,
)
from pyggml.models.feed_forward import clipped_silu
from pyggml.models.part import Part
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    assert b.rope is not None
    n_layer, half = b.config.n_layer, b.rope.n_dims // 2
    base = r.number("rope.freq_base_swa", 10000.0, 1.0, 1e12)
    plain = replace(b.rope, freq_base=base, freq_scale=1.0, factors=())
    windows = read_windows(r, b, 1, rope=plain)
    limits, shared_limits = (
        r.numbers(f"swiglu_clamp_{x}", n_layer, 0.0, 0.0, 1e6) for x in ("exp", "shexp")
    )
    if half % 2:
        r.faults.append(f"rope.dimension_count is {2 * half}, wanted a multiple of 4")
    full = replace(b.rope, n_dims=half - half % 2, n_factors=half)
    experts = read_experts(r, b, swiglu, **read_router(r, SIGMOID))
    shared, is_dense = read_shared(r, b, swiglu), dense_without_router(r)

    def feed_forward(i: int) -> Part:
        unit = clipped_silu(shared_limits[i])
        if is_dense(i):
            return b.gated_mlp(i, unit)
        mixture = replace(experts[i], unit=clipped_silu(limits[i]))
        return Sum((mixture, replace(shared, unit=unit))) if shared else mixture

    def block(i: int) -> Part:
        gated = not r.has_tensors or f"blk.{i}.attn_gate.weight" in r.shapes
        normed = not r.has_tensors or f"blk.{i}.attn_q_norm.weight" in r.shapes
        here = {"rope": full} | windows[i] | (b.head_norms(i) if normed else {})
        attention = b.attention(i, GatedOutput if gated else Attention, **here)
        return b.pre_norm(attention, feed_forward(i))

    return b.decoder(block, tied=False)


STEP35 = Architecture(
    "step35",
    _decoder,
    {
        "attention.head_count": np.array([4, 2], np.int32),
        "attention.head_count_kv": np.array([2, 1], np.int32),
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": np.array([False, True]),
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 256,
        "expert_shared_feed_forward_length": 256,
        "leading_dense_block_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "swiglu_clamp_exp": 0.5,
        "swiglu_clamp_shexp": np.array([0.0, 0.4], np.float32),
        "rope.dimension_count": 4,
    },
)
