"""granite, granitemoe, granitehybrid (Granite 4), granite_swa and minicpm. As llama, with factors
of embeddings, scores, residual branches and logits. In granitehybrid, layers without key heads have
Mamba 2. In granite_swa some layers have windows, some no rotary positions, and all have sinks. Any
may have experts, some beside a shared expert; published files of granite and minicpm have none."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import Basics, read_basics, read_windows
from pyggml.models.block import Sum
from pyggml.models.experts import has_experts, read_experts, read_shared
from pyggml.models.mamba2 import STATES, read_mamba2
from pyggml.ops import swiglu


def _granite(r: Reader, hybrid: bool = False) -> Decoder:
    """`rope.scaling.finetuned` false: no rotary positions."""
    b = read_basics(r, rope="normal", least_heads=0 if hybrid else 1)
    rope = b.rope if r.flag("rope.scaling.finetuned", True) else None
    mamba = read_mamba2(r, b.config.n_embd) if hybrid else None
    return _decoder(r, replace(b, rope=rope), mamba)


def _granitemoe(r: Reader) -> Decoder:
    return _decoder(r, read_basics(r, rope="normal"))


def _minicpm(r: Reader) -> Decoder:
    """Files of older converters lack the factors."""
    b = read_basics(r, rope="normal")
    n_embd, n_layer = b.config.n_embd, b.config.n_layer
    return _decoder(r, b, embedding=12.0, residual=1.4 / n_layer**0.5, logit=256.0 / n_embd)


def _granite_swa(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal")
    n = b.config.n_layer
    rotary = r.flags("attention.rope_pattern", n, (True,) * n)
    windows = read_windows(r, b, 1, rope=b.rope)
    fields = [
        {"sinks": True} | windows[i] | ({} if rotary[i] else {"rope": None}) for i in range(n)
    ]
    return _decoder(r, b, fields=fields, fused=True)


def _feed_forward(r: Reader, b: Basics, fused: bool) -> Sequence[Part]:
    if not has_experts(r):
        return [b.gated_mlp(i, swiglu) for i in range(b.config.n_layer)]
    shared = read_shared(r, b, swiglu)
    shared = replace(shared, fused=fused) if shared else None
    experts = read_experts(r, b, swiglu, own_length=False)
    return [Sum((e, shared)) if shared else e for e in experts]


def _decoder(
    r: Reader,
    b: Basics,
    mamba: Part | None = None,
    embedding: float = 0.0,
    residual: float = 0.0,
    logit: float | None = None,
    fields: Sequence[Mapping[str, Any]] = (),
    fused: bool = False,
) -> Decoder:
    """A factor of 0 means none. fields: those of each layer's attention; fused: the shared expert's
    gate and up are one matrix."""
    scale = r.number("attention.scale", 0.0, 0.0, 1e6)
    factor = r.number("residual_scale", residual, -1e6, 1e6) or 1.0
    feed_forward = _feed_forward(r, b, fused)

    def block(i: int) -> Part:
        more = fields[i] if fields else {}
        mixer = b.attention(i, scale=scale, **more) if mamba is None or b.heads[i].n_kv else mamba
        return b.pre_norm(mixer, feed_forward[i], factor)

    return b.decoder(
        block,
        embedding_scale=r.number("embedding_scale", embedding, -1e6, 1e6) or 1.0,
        logit_scale=1 / r.number("logit_scale", logit, 1e-6, 1e6),
    )


_SCALES = {
    "attention.scale": 0.1,
    "residual_scale": 0.5,
    "embedding_scale": 4.0,
    "logit_scale": 2.0,
}

GRANITE = Architecture("granite", _granite, _SCALES)
GRANITEMOE = Architecture(
    "granitemoe",
    _granitemoe,
    _SCALES | {"expert_count": 4, "expert_used_count": 2, "expert_shared_feed_forward_length": 256},
)
GRANITE_SWA = Architecture(
    "granite_swa",
    _granite_swa,
    dict(GRANITEMOE.example)
    | {
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": np.array([True, False]),
        "attention.rope_pattern": np.array([True, False]),
    },
)
MINICPM = Architecture("minicpm", _minicpm, {})
GRANITEHYBRID = Architecture(
    "granitehybrid",
    partial(_granite, hybrid=True),
    dict(GRANITEMOE.example) | {"attention.head_count_kv": np.array([0, 2], np.int32), **STATES},
)
