"""Decoders that differ from llama by scales, caps, windows, norms or rotation, in every way to
configure them that changes the graph."""

from __future__ import annotations

from math import log, sqrt

import numpy as np

from peers.dense import LAYER_NORM, QK_BESIDE, RMS_NORM, one_more
from peers.peer import Arrays, Peer, drawn

RMS_NORM_5 = {"attention.layer_norm_rms_epsilon": 1e-5}
WINDOW = {"sliding_window": 5}
HEADS_16 = {"attention.key_length": 16, "attention.value_length": 16}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
FULL_YARN = {"full_attention": YARN, "sliding_attention": DEFAULT}
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.5, 2.0, 4.0],
    "long_factor": [2.0, 1.0, 0.5, 3.0],
    "original_max_position_embeddings": 16,
}


def one_less(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Weights of norms near 0."""
    return drawn(name, shape, rng) - (len(shape) == 1)


def upright(state: Arrays) -> Arrays:
    """Conv1D's matrices are (n_in, n_out)."""
    endings = ("attn.weight", "proj.weight", "fc.weight")
    return {n: a.T if n.endswith(endings) else a for n, a in state.items()}


def gemma(number: str, config: dict, keys: dict) -> Peer:
    return Peer(
        name=f"gemma{number}",
        architecture=f"gemma{number}",
        model=f"Gemma{number}ForCausalLM",
        config={"head_dim": 16, "tie_word_embeddings": True} | config,
        keys=RMS_NORM | HEADS_16 | keys,
        convert=one_more,
        draw=one_less,
    )


GEMMA = [
    gemma("", {}, {}),
    gemma(
        "2",
        WINDOW
        | {"query_pre_attn_scalar": 16, "num_hidden_layers": 3}
        | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0},
        {"attention.sliding_window": 5, "block_count": 3}
        | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0},
    ),
    gemma(
        "3",
        WINDOW | {"query_pre_attn_scalar": 16, "num_hidden_layers": 7},
        {"attention.sliding_window": 5, "block_count": 7, "rope.freq_base": 1e6},
    ),
]
GPT2 = Peer(
    name="gpt2",
    architecture="gpt2",
    model="GPT2LMHeadModel",
    config={"n_inner": 48, "tie_word_embeddings": True},
    keys=LAYER_NORM | {"attention.head_count_kv": None},
    convert=upright,
)
GRANITE = Peer(
    name="granite",
    architecture="granite",
    model="GraniteForCausalLM",
    config={"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.7}
    | {"logits_scaling": 2.0},
    keys=RMS_NORM
    | {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.7, "logit_scale": 2.0},
    convert=QK_BESIDE,
)
OLMO = [
    Peer(name="olmo2", architecture="olmo2", model="Olmo2ForCausalLM", keys=RMS_NORM_5),
    Peer(
        name="olmo3-yarn",
        architecture="olmo2",
        model="Olmo3ForCausalLM",
        config=WINDOW | {"num_hidden_layers": 4, "rope_parameters": FULL_YARN},
        keys=RMS_NORM_5 | YARN_KEYS | {"attention.sliding_window": 5, "block_count": 4},
    ),
]
PHI3 = [
    Peer(
        name="phi3",
        architecture="phi3",
        model="Phi3ForCausalLM",
        config={"pad_token_id": 0, "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}},
        keys=RMS_NORM_5 | {"rope.dimension_count": 4},
    ),
    Peer(
        name="phi3-long",
        architecture="phi3",
        model="Phi3ForCausalLM",
        config={"pad_token_id": 0, "rope_parameters": LONG}
        | {"original_max_position_embeddings": 16},
        keys=RMS_NORM_5
        | {"rope.scaling.attn_factor": sqrt(1 + log(4) / log(16))}
        | {"rope.scaling.original_context_length": 16},
        extra={
            f"rope_factors_{kind}.weight": np.array(LONG[f"{kind}_factor"], np.float32)
            for kind in ("short", "long")
        },
    ),
]
SMOLLM3 = Peer(
    name="smollm3",
    architecture="smollm3",
    model="SmolLM3ForCausalLM",
    config={"num_hidden_layers": 5, "rope_parameters": DEFAULT} | {"pad_token_id": 0},
    keys=RMS_NORM | {"block_count": 5},
    convert=QK_BESIDE,
)

MISTRAL3 = Peer(
    name="mistral3",
    architecture="mistral3",
    model="Ministral3ForCausalLM",
    config={"head_dim": 16, "sliding_window": None}
    | {
        "rope_parameters": YARN
        | {"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5}
        | {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 8}
    },
    keys=RMS_NORM_5
    | HEADS_16
    | YARN_KEYS
    | {"rope.scaling.original_context_length": 8, "attention.temperature_scale": 0.5}
    | {"rope.scaling.yarn_beta_fast": 4.0, "rope.scaling.yarn_beta_slow": 0.5}
    | {"rope.scaling.yarn_log_multiplier": 0.5},
    convert=QK_BESIDE,
)
LLAMAS = [
    Peer(
        name="arcee",
        architecture="arcee",
        model="ArceeForCausalLM",
        keys=RMS_NORM_5,
        convert=QK_BESIDE,
    ),
    Peer(
        name="ernie4_5",
        architecture="ernie4_5",
        model="Ernie4_5ForCausalLM",
        config={"rope_parameters": DEFAULT, "head_dim": 8},
        keys=RMS_NORM_5,
    ),
    Peer(
        name="seed_oss",
        architecture="seed_oss",
        model="SeedOssForCausalLM",
        config={"rope_parameters": DEFAULT, "head_dim": 16},
        keys=RMS_NORM | HEADS_16,
    ),
]

GLM4 = Peer(
    name="glm4",
    architecture="glm4",
    model="Glm4ForCausalLM",
    config={"head_dim": 16, "attention_bias": True, "pad_token_id": 0, "rms_norm_eps": 1e-5}
    | {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}},
    keys=RMS_NORM_5 | HEADS_16 | {"rope.dimension_count": 8},
)

VARIANTS = [*GEMMA, GPT2, GRANITE, *OLMO, *PHI3, SMOLLM3, MISTRAL3, GLM4, *LLAMAS]
