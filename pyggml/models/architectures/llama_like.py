"""Decoders of one attention and one feed-forward part a block that differ in a word or two: a row
of `ROWS` says which.

smollm3 has rotary positions in three of four layers. Baichuan 13B, recognised by its 40 layers, has
ALiBi instead of them; so has BLOOM, with a norm after the embedding. starcoder is StarCoder 1, phi2
Phi 1 to 2, nemotron Nemotron 3 and 4 and Minitron: its norm weights in a file are the published
ones plus 1.

ernie4_5, qwen2vl and refact pass over biases, refact and pangu-embedded over frequency factors, as
llama.cpp does: it loads them and uses none. paddleocr and qwen2vl are the text of their models;
llama.cpp passes over the epsilon of qwen2vl's norms. GELUs are the tanh form, as in llama.cpp.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from pyggml.graph.tensor import Tensor
from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import Basics, read_basics
from pyggml.models.rope import check_sections
from pyggml.ops import gelu, relu, sqr, swiglu

NORMAL, NEOX, NO_ROPE = {"rope": "normal"}, {"rope": "neox"}, {"rope": None}
LAYER_NORM = {"layer_norm": ("weight", "bias")}
FUSED_QKV = {"fused_qkv": True}
UNTIED: dict[str, Any] = {"tied": False}
ALIBI = {"max_bias": 8.0}
NO_OUTPUT_BIAS: dict[str, Any] = {"unread": ("attn_output.bias",)}
NO_FACTORS: dict[str, Any] = {"unread": ("rope_freqs.weight",)}
NO_LOGIT_BIAS: dict[str, Any] = {"unread": ("output.bias",)}
NO_BIASES: dict[str, Any] = {
    "unread": (
        *("attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
        *("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"),
    )
}


def _squared_relu(x: Tensor) -> Tensor:
    return sqr(relu(x))


def _decoder(
    r: Reader,
    basics: Mapping[str, Any],
    *,
    activation: Callable[[Tensor], Tensor] | None = None,
    fused_up: bool = False,
    of_layer: Callable[[Basics, int], Mapping[str, Any]] = lambda b, i: {},
    sections: bool = False,
    parallel: bool = False,
    learned: bool = False,
    normed: bool = False,
    reads_alibi: bool = False,
    **more: Any,
) -> Decoder:
    """
    basics      arguments of read_basics
    activation  of a feed-forward part without a gate; None for a gated one
    fused_up    gate and up come from one matrix
    of_layer    fields of the attention of one layer
    sections    rotary pairs have sections
    parallel    attention and feed-forward read one norm, side by side
    learned     positions have embeddings
    normed      a norm follows the embedding
    reads_alibi ALiBi's bias is a key
    more        fields of the decoder
    """
    b = read_basics(r, **basics)
    if sections and b.rope:
        check_sections(r, b.rope)
    alibi = {"max_bias": r.number("attention.max_alibi_bias", 0.0, 0.0, 1e3)} if reads_alibi else {}

    def block(i: int) -> Part:
        plain = b.plain(i, activation) if activation else b.gated_mlp(i, swiglu, fused_up)
        attention = b.attention(i, **of_layer(b, i), **alibi)
        return b.parallel(attention, plain) if parallel else b.pre_norm(attention, plain)

    more |= {"n_positions": b.config.n_ctx} if learned else {}
    more |= {"prelude": b.norm("token_embd_norm")} if normed else {}
    return b.decoder(block, **more)


def _row(
    name: str, basics: Mapping[str, Any], example: Mapping[str, object] | None = None, **more: Any
) -> Architecture:
    return Architecture(name, partial(_decoder, basics=basics, **more), example or {})


def _alibi(b: Basics, layer: int) -> Mapping[str, Any]:
    return ALIBI


def _alibi_of_13b(b: Basics, layer: int) -> Mapping[str, Any]:
    return NO_ROPE | ALIBI if b.config.n_layer == N_LAYER_13B else {}


def _three_of_four(b: Basics, layer: int) -> Mapping[str, Any]:
    return NO_ROPE if layer % 4 == 3 else {}


def _scale(b: Basics, layer: int) -> Mapping[str, Any]:
    """Scores are divided by the length of a head, not its root."""
    return {"scale": 1 / b.heads[layer].size}


def _norms_after_rope(b: Basics, layer: int) -> Mapping[str, Any]:
    return b.head_norms(layer) | {"norms_last": True}


N_LAYER_13B = 40
MAX_BIAS = {"attention.max_alibi_bias": 8.0}
JAIS: dict[str, Any] = {"reads_alibi": True, "of_layer": _scale}
SECTIONS = {"rope.dimension_sections": np.array([1, 1, 0, 0], np.int32)}

FUSED, ONE_KEY = LAYER_NORM | FUSED_QKV, {"attention.head_count_kv": 1}
TWO_TURN = {"rope.dimension_count": 2}

ROWS = (
    _row("gpt2", FUSED | NO_ROPE, activation=gelu, learned=True),
    _row("starcoder", FUSED | NO_ROPE, ONE_KEY, activation=gelu, learned=True),
    _row("bloom", FUSED | NO_ROPE, of_layer=_alibi, activation=gelu, normed=True),
    _row("baichuan", NORMAL, of_layer=_alibi_of_13b, **UNTIED),
    _row("arcee", NORMAL, activation=_squared_relu),
    _row("smollm3", NORMAL, {"block_count": 4}, of_layer=_three_of_four),
    _row("starcoder2", NEOX | LAYER_NORM, activation=gelu),
    _row("nemotron", NEOX | LAYER_NORM, TWO_TURN, activation=_squared_relu, **UNTIED),
    _row("phi2", NEOX | LAYER_NORM, TWO_TURN, activation=gelu, parallel=True, **UNTIED),
    _row("internlm2", NORMAL),
    _row("ernie4_5", NORMAL, **NO_OUTPUT_BIAS),
    _row("exaone", NEOX),
    _row("xverse", NORMAL, **UNTIED),
    _row("pangu-embedded", NEOX, **NO_FACTORS),
    _row("paddleocr", NEOX, SECTIONS, sections=True),
    _row("qwen2vl", NEOX, SECTIONS, sections=True, **NO_LOGIT_BIAS),
    _row("chatglm", NORMAL, TWO_TURN, fused_up=True),
    _row("refact", NO_ROPE, of_layer=_alibi, **NO_BIASES),
    _row("openelm", NEOX | FUSED_QKV, of_layer=Basics.head_norms),
    _row("maincoder", NORMAL, of_layer=_norms_after_rope),
    _row("orion", NEOX | LAYER_NORM, **UNTIED),
    _row("jais", FUSED | NO_ROPE, MAX_BIAS, **JAIS, **UNTIED),
    _row("jais2", NEOX | LAYER_NORM, activation=_squared_relu),
    _row("codeshell", NEOX | LAYER_NORM, activation=gelu, **UNTIED),
)
