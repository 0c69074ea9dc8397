"""The modules of transformers' classes that adapters update, by architecture.

A module's rows may lie in another order than those of its tensor in a GGUF file, its columns too,
and one module may be several tensors. llama.cpp's converter does this to weights; a low-rank update
s·BA follows with the rows of B and the columns of A.

Source: llama.cpp, conversion/*.py (`modify_tensors`); transformers' model classes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

# -- orders ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of a layer's attention, and of its delta net: keys, values and their size."""

    n: int
    n_kv: int
    n_keys: int = 0
    n_values: int = 0
    size: int = 0


# A module's rows (or columns), numbered, → those of each of its tensors.
Order = Callable[[np.ndarray, Heads], list[np.ndarray]]


def _pairs(rows: np.ndarray, n_head: int) -> np.ndarray:
    """Rotary pairs (i, i + d/2) of each head → (2i, 2i + 1)."""
    return rows.reshape(n_head, 2, -1).swapaxes(1, 2).ravel()


def _q_pairs(rows: np.ndarray, heads: Heads) -> list[np.ndarray]:
    return [_pairs(rows, heads.n)]


def _k_pairs(rows: np.ndarray, heads: Heads) -> list[np.ndarray]:
    return [_pairs(rows, heads.n_kv)]


def _groups(rows: np.ndarray, heads: Heads) -> list[np.ndarray]:
    """Groups of the queries of a key, the key and its value → q, k, v."""
    n_q = heads.n // heads.n_kv
    groups = rows.reshape(heads.n_kv, n_q + 2, -1)
    return [part.ravel() for part in (groups[:, :n_q], groups[:, n_q], groups[:, n_q + 1])]


def _joined_groups(rows: np.ndarray, heads: Heads) -> list[np.ndarray]:
    return [np.concatenate(_groups(rows, heads))]


def _paired_groups(rows: np.ndarray, heads: Heads) -> list[np.ndarray]:
    q, k, v = _groups(rows, heads)
    return [_pairs(q, heads.n), _pairs(k, heads.n_kv), v]


def _paired_thirds(rows: np.ndarray, heads: Heads) -> list[np.ndarray]:
    q, k, v = np.split(rows, 3)
    return [_pairs(q, heads.n), _pairs(k, heads.n_kv), v]


def _halves(rows: np.ndarray, heads: Heads) -> list[np.ndarray]:
    return np.split(rows, 2)


def _turns(rows: np.ndarray, heads: Heads) -> list[np.ndarray]:
    return [rows[::2], rows[1::2]]


def _values_apart(rows: np.ndarray, heads: Heads) -> list[np.ndarray]:
    """Value heads of the same key, which lie together, as far apart as there are keys."""
    return [rows.reshape(heads.n_keys, heads.n_values // heads.n_keys, -1).swapaxes(0, 1).ravel()]


def _qk_and_values_apart(rows: np.ndarray, heads: Heads) -> list[np.ndarray]:
    n = 2 * heads.n_keys * heads.size
    return [np.concatenate([rows[:n], *_values_apart(rows[n:], heads)])]


def _keys_together(rows: np.ndarray, heads: Heads) -> list[np.ndarray]:
    """q, k, v and z by keys → all q, k and v; all z."""
    wide = heads.n_values // heads.n_keys * heads.size
    at = np.cumsum([heads.size, heads.size, wide])
    q, k, v, z = (part.ravel() for part in np.split(rows.reshape(heads.n_keys, -1), at, 1))
    return [np.concatenate([q, k, v]), z]


# -- layouts --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A class's modules.

    layers    what stands before the number of a layer
    modules   what stands behind it
    outer     modules outside of layers
    rows      module → the order of its rows, if it is another
    columns   module → the order of its columns, if it is another
    fused     module → its tensors, where they are several
    experts   the module whose parameters gate_up_proj and down_proj are all experts' matrices
    gate_up   the order of the rows of gate_up_proj: those of the gates, those of the ups
    conv1d    whether the matrices are transformers' Conv1D, stored as (n_in, n_out)
    """

    layers: str = "model.layers"
    modules: tuple[str, ...]
    outer: tuple[str, ...] = ("model.embed_tokens", "lm_head")
    rows: Mapping[str, Order] = field(default_factory=dict)
    columns: Mapping[str, Order] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    experts: str = "mlp.experts"
    gate_up: Order = _halves
    conv1d: bool = False


_Q, _K, _V, _O = (f"self_attn.{x}_proj" for x in "qkvo")
_QKV = (_Q, _K, _V)
_GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_SHARED = tuple(f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down"))
_SHARED += ("mlp.shared_expert_gate",)
_FEED_FORWARD = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_BY_NUMBER = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
_DELTA = tuple(f"linear_attn.{x}" for x in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
_OUT = "linear_attn.out_proj"
_QKVZ = "linear_attn.in_proj_qkvz"
_PAIRED: dict[str, Order] = {_Q: _q_pairs, _K: _k_pairs}
_APART: dict[str, Order] = dict.fromkeys(_DELTA[1:], _values_apart)
_APART[_DELTA[0]] = _qk_and_values_apart
_INPUT = "shared_mlp.input_linear"

_LATENT_Q = ("self_attn.q_a_proj", "self_attn.q_b_proj", _Q)
_LATENT = ("self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", _O)
_SHARED_EXPERTS = tuple(f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down"))
_KIMI = tuple(f"self_attn.{x}_proj" for x in ("f_a", "f_b", "g_a", "g_b", "b"))

_PLAIN = Layout(modules=(*_QKV, _O, *_GATED))
_LLAMA = Layout(modules=_PLAIN.modules, rows=_PAIRED)
_GPT2 = Layout(
    layers="transformer.h",
    modules=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    outer=("transformer.wte", "lm_head"),
    conv1d=True,
)
_LFM2 = Layout(
    modules=(*_QKV, "self_attn.out_proj", *_BY_NUMBER, "conv.in_proj", "conv.out_proj"),
    experts="feed_forward.experts",
)
_MAMBA = Layout(
    layers="backbone.layers",
    modules=tuple(f"mixer.{x}_proj" for x in ("in", "x", "dt", "out")),
    outer=("backbone.embeddings", "lm_head"),
)
_BLOOM = Layout(
    layers="transformer.h",
    modules=("self_attention.query_key_value", "self_attention.dense", *_FEED_FORWARD),
    outer=("transformer.word_embeddings", "lm_head"),
    rows={"self_attention.query_key_value": _joined_groups},
)

LAYOUTS: dict[str, Layout] = {
    **dict.fromkeys(("llama", "mistral3", "granite", "olmo", "smollm3", "arcee"), _LLAMA),
    **dict.fromkeys(("qwen2", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "olmo2"), _PLAIN),
    **dict.fromkeys(("olmoe", "stablelm", "command-r", "cohere2", "nemotron"), _PLAIN),
    **dict.fromkeys(("ernie4_5", "seed_oss"), _PLAIN),
    "gemma3n": Layout(
        modules=(
            *_PLAIN.modules,
            *("per_layer_input_gate", "per_layer_projection"),
            *("laurel.linear_left", "laurel.linear_right"),
            *(f"altup.{x}" for x in ("modality_router", "prediction_coefs", "correction_coefs")),
        )
    ),
    "gemma4": Layout(
        modules=(*_PLAIN.modules, "per_layer_input_gate", "per_layer_projection", "router.proj"),
        experts="experts",
    ),
    "gpt-oss": Layout(modules=_PLAIN.modules, gate_up=_turns),
    "qwen2moe": Layout(modules=(*_PLAIN.modules, *_SHARED)),
    "granitemoe": Layout(
        modules=(*_LLAMA.modules, _INPUT, "shared_mlp.output_linear"),
        rows={**_PAIRED, _INPUT: _halves},
        fused={_INPUT: ("ffn_gate_shexp", "ffn_up_shexp")},
        experts="block_sparse_moe.experts",
    ),
    "qwen35": Layout(
        modules=(*_PLAIN.modules, *_DELTA, _OUT), rows=_APART, columns={_OUT: _values_apart}
    ),
    "qwen35moe": Layout(
        modules=(*_QKV, _O, *_SHARED, *_DELTA, _OUT), rows=_APART, columns={_OUT: _values_apart}
    ),
    "qwen3next": Layout(
        modules=(*_QKV, _O, *_SHARED, _QKVZ, "linear_attn.in_proj_ba", _OUT),
        rows={_QKVZ: _keys_together},
        fused={_QKVZ: ("attn_qkv", "attn_gate")},
    ),
    **dict.fromkeys(
        ("deepseek2", "mistral4"),
        Layout(modules=(*_LATENT_Q, *_LATENT, *_GATED, *_SHARED_EXPERTS)),
    ),
    "minicpm3": Layout(modules=(*_LATENT_Q, *_LATENT, *_GATED)),
    "kimi-linear": Layout(modules=(*_QKV, *_LATENT, *_KIMI, *_GATED, *_SHARED_EXPERTS)),
    "phi2": Layout(modules=(*_QKV, "self_attn.dense", "mlp.fc1", "mlp.fc2")),
    "phi3": Layout(modules=("self_attn.qkv_proj", _O, "mlp.gate_up_proj", "mlp.down_proj")),
    "glm4": Layout(modules=(*_QKV, _O, "mlp.gate_up_proj", "mlp.down_proj")),
    "starcoder2": Layout(modules=(*_QKV, _O, "mlp.c_fc", "mlp.c_proj")),
    "lfm2": _LFM2,
    "lfm2moe": _LFM2,
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "gpt2": _GPT2,
    "starcoder": Layout(layers=_GPT2.layers, modules=_GPT2.modules, outer=_GPT2.outer),
    "bloom": _BLOOM,
    "falcon": _BLOOM,
    "gptneox": Layout(
        layers="gpt_neox.layers",
        modules=("attention.query_key_value", "attention.dense", *_FEED_FORWARD),
        outer=("gpt_neox.embed_in", "lm_head"),
        rows={"attention.query_key_value": _joined_groups},
    ),
    # Classes of their own authors, which come with the model.
    "plm": Layout(modules=(_Q, *_LATENT, "mlp.up_proj", "mlp.down_proj")),
    "exaone": Layout(
        layers="transformer.h",
        modules=(
            *(f"attn.attention.{x}_proj" for x in ("q", "k", "v", "out")),
            *("mlp.c_fc_0", "mlp.c_fc_1", "mlp.c_proj"),
        ),
        outer=("transformer.wte", "lm_head"),
    ),
    "internlm2": Layout(
        modules=("attention.wqkv", "attention.wo", *_BY_NUMBER),
        outer=("model.tok_embeddings", "output"),
        rows={"attention.wqkv": _paired_groups},
        fused={"attention.wqkv": ("attn_q", "attn_k", "attn_v")},
    ),
    "baichuan": Layout(
        modules=("self_attn.W_pack", _O, *_GATED),
        rows={"self_attn.W_pack": _paired_thirds},
        fused={"self_attn.W_pack": ("attn_q", "attn_k", "attn_v")},
    ),
}
