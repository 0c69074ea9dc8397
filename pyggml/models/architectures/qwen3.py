"""qwen3 and qwen3moe. As qwen2, without biases and with an RMS norm of each head of q and k before
rope. qwen3moe has experts in every layer.

qwen3vl and qwen3vlmoe are the text of their models. mellum and maple have windows in some layers;
maple rotates in these alone, and clips gates.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics, read_windows
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.experts import read_experts
from pyggml.models.feed_forward import clipped_swiglu
from pyggml.models.part import Part
from pyggml.models.rope import check_sections
from pyggml.ops import swiglu


def _decoder(r: Reader, sections: bool = False) -> Decoder:
    b = read_basics(r, rope="neox")
    if sections and b.rope:
        check_sections(r, b.rope, interleaved=True)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, **b.head_norms(i)), b.gated_mlp(i, swiglu))

    return b.decoder(block)


def _with_experts(r: Reader, sections: bool = False) -> Decoder:
    b = read_basics(r, rope="neox")
    if sections and b.rope:
        check_sections(r, b.rope, interleaved=True)
    experts = read_experts(r, b, swiglu)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, **b.head_norms(i)), experts[i])

    return b.decoder(block)


def _mellum(r: Reader) -> Decoder:
    """Layers with a window rotate as if the file had no scaling."""
    b = read_basics(r, rope="neox")
    assert b.rope is not None
    experts = read_experts(r, b, swiglu)
    plain = {"freq_base": b.rope.freq_base, "freq_scale": 1.0}
    windows = read_windows(r, b, 4, window=0, **plain, ext_factor=0.0, attn_factor=1.0)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, **b.head_norms(i), **windows[i]), experts[i])

    return b.decoder(block, tied=False)


def _maple(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    limits = r.numbers("swiglu_clamp_exp", b.config.n_layer, None, 0.0, 1e6)
    windows = read_windows(r, b, 1)
    experts = read_experts(r, b, swiglu)

    def block(i: int) -> Part:
        clipped = replace(experts[i], unit=clipped_swiglu(limits[i]))
        return b.pre_norm(b.attention(i, **b.head_norms(i), **{"rope": None} | windows[i]), clipped)

    return b.decoder(block, tied=False)


_EXPERTS: dict[str, object] = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 256,
}
_SECTIONS: dict[str, object] = {"rope.dimension_sections": np.array([4, 4, 4, 0], np.int32)}
_WINDOWS: dict[str, object] = {"attention.sliding_window": 8}
QWEN3 = Architecture("qwen3", _decoder, {})
QWEN3MOE = Architecture("qwen3moe", _with_experts, _EXPERTS)
QWEN3VL = Architecture(
    "qwen3vl", partial(_decoder, sections=True), _SECTIONS | {"rope.dimension_count": 4}
)
QWEN3VLMOE = Architecture(
    "qwen3vlmoe",
    partial(_with_experts, sections=True),
    _EXPERTS | _SECTIONS | {"rope.dimension_count": 4},
)
MELLUM = Architecture(
    "mellum", _mellum, _EXPERTS | _WINDOWS | {"attention.sliding_window_pattern": 2}
)
MAPLE = Architecture(
    "maple",
    _maple,
    _EXPERTS
    | _WINDOWS
    | {"attention.sliding_window_pattern": np.array([True, False]), "swiglu_clamp_exp": 0.5},
)
