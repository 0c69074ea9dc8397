"""Decoders with attention and one feed-forward part a block."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from peers.peer import Arrays, Peer

TANH = "gelu_pytorch_tanh"  # llama.cpp has no other for these
LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
RMS_NORM = {"attention.layer_norm_rms_epsilon": 1e-6}
SLOW = {"rope.freq_base": 500000.0}
WIDE = {"feed_forward_length": 128}


def each(endings: tuple[str, ...], change: Callable[[str, np.ndarray], np.ndarray]):
    """A conversion of the weights and biases whose names end so."""
    full = tuple(f"{e}.{part}" for e in endings for part in ("weight", "bias"))

    def convert(state: Arrays) -> Arrays:
        return {n: change(n, a) if n.endswith(full) else a for n, a in state.items()}

    return convert


def rows_beside(n_head: dict[str, int]) -> Callable[[Arrays], Arrays]:
    """Rows of q and k in the order of "normal" rotary pairs: ending of a name -> heads."""

    def change(name: str, array: np.ndarray) -> np.ndarray:
        n = next(n for ending, n in n_head.items() if ending in name)
        pairs = array.reshape(n, 2, -1, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)

    return each(tuple(n_head), change)


def grouped(ending: str, n_kv: int, n_q: int) -> Callable[[Arrays], Arrays]:
    """Rows of a packed matrix that lie by groups of n_q queries, a key and a value -> q, k, v."""

    def change(_: str, array: np.ndarray) -> np.ndarray:
        groups = array.reshape(n_kv, n_q + 2, -1, *array.shape[1:])
        parts = (groups[:, :n_q], groups[:, n_q], groups[:, n_q + 1])
        return np.concatenate([p.reshape(-1, *array.shape[1:]) for p in parts])

    return each((ending,), change)


def norms_of_heads(state: Arrays) -> Arrays:
    """Norms that have a tensor for each head, as one matrix, which is what llama.cpp loads; its
    converter stops with "Unprocessed norms" on them."""
    found: dict[str, list[np.ndarray]] = {}
    for name, array in state.items():
        found.setdefault(re.sub(r"\.norms\.\d+\.", ".", name), []).append(array)
    return {n: np.stack(a) if len(a) > 1 else a[0] for n, a in found.items()}


def one_more(state: Arrays) -> Arrays:
    """Weights of norms get the 1 that the class adds to them when it runs."""
    return {n: a + 1 if n.endswith("norm.weight") else a for n, a in state.items()}


QK_BESIDE = rows_beside({"q_proj": 4, "k_proj": 2})

GPTNEOX = [
    Peer(
        name=f"gptneox{name}",
        architecture="gptneox",
        model="GPTNeoXForCausalLM",
        config={"hidden_act": TANH, "rotary_pct": 0.5, "use_parallel_residual": parallel},
        keys=LAYER_NORM
        | {"rope.dimension_count": 4, "use_parallel_residual": parallel}
        | {"attention.head_count_kv": None},
        convert=grouped("query_key_value", 4, 1),
    )
    for name, parallel in (("", True), ("-sequential", False))
]

PHI2 = Peer(
    name="phi2",
    architecture="phi2",
    model="PhiForCausalLM",
    config={"intermediate_size": 128, "num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    keys=LAYER_NORM | WIDE | {"rope.dimension_count": 4, "attention.head_count_kv": 4},
)

STARCODER2 = Peer(
    name="starcoder2",
    architecture="starcoder2",
    model="Starcoder2ForCausalLM",
    config={"tie_word_embeddings": True, "sliding_window": None},
    keys=LAYER_NORM,
)

STABLELM = [
    Peer(
        name=f"stablelm{name}",
        architecture="stablelm",
        model="StableLmForCausalLM",
        config={"partial_rotary_factor": 0.5} | changes,
        keys=LAYER_NORM | {"rope.dimension_count": 4, "use_parallel_residual": name == "-parallel"},
        convert=norms_of_heads,
    )
    for name, changes in (
        ("", {"use_qkv_bias": True}),
        ("-parallel", {"use_parallel_residual": True, "qk_layernorm": True}),
    )
]

FALCON = [
    Peer(
        name=f"falcon{name}",
        architecture="falcon",
        model="FalconForCausalLM",
        config={"activation": TANH, "tie_word_embeddings": True, "intermediate_size": None}
        | {"num_key_value_heads": None, "num_kv_heads": n_kv, "new_decoder_architecture": n_kv > 1},
        keys=LAYER_NORM | WIDE | {"attention.head_count_kv": n_kv},
        convert=grouped("query_key_value", n_kv, 4 // n_kv),
    )
    for name, n_kv in (("", 1), ("-two-norms", 2))
]

COMMAND_R = [
    Peer(
        name=f"command-r{name}",
        architecture="command-r",
        model="CohereForCausalLM",
        config={"tie_word_embeddings": True, "logit_scale": 0.25, "use_qk_norm": bool(name)},
        keys=LAYER_NORM | SLOW | {"logit_scale": 0.25, "rope.scaling.type": "none"},
        not_in_llama_cpp=name and "it expects these norms from 64 layers on",
    )
    for name in ("", "-norms")
]

COHERE2 = Peer(
    name="cohere2",
    architecture="cohere2",
    model="Cohere2ForCausalLM",
    config={"tie_word_embeddings": True, "logit_scale": 0.25, "sliding_window": 5}
    | {"layer_types": ["sliding_attention", "full_attention"], "rotary_pct": 1.0},
    keys=LAYER_NORM
    | {"rope.freq_base": 10000.0, "logit_scale": 0.25, "rope.scaling.type": "none"}
    | {"attention.sliding_window": 5, "rope.dimension_count": 8}
    | {"attention.sliding_window_pattern": [True, False]},
)

NEMOTRON = Peer(
    name="nemotron",
    architecture="nemotron",
    model="NemotronForCausalLM",
    keys=LAYER_NORM | {"rope.dimension_count": 4, "rope.scaling.type": "none"},
    convert=one_more,
)

STARCODER = Peer(
    name="starcoder",
    architecture="starcoder",
    model="GPTBigCodeForCausalLM",
    config={"num_key_value_heads": None, "tie_word_embeddings": True},
    keys=LAYER_NORM | WIDE | {"attention.head_count_kv": 1},
)

BLOOM = Peer(
    name="bloom",
    architecture="bloom",
    model="BloomForCausalLM",
    config={"tie_word_embeddings": True, "seq_length": 64},
    keys=LAYER_NORM | WIDE | {"attention.head_count_kv": 4},
    convert=lambda state: grouped("query_key_value", 4, 1)(
        {n.removeprefix("transformer."): a for n, a in state.items()}
    ),
)

# Their own classes are not part of transformers. What llama.cpp's converter writes is a llama with
# rotary pairs beside each other (internlm2, baichuan) or halves apart (exaone).
LLAMAS = [
    Peer(
        name=name,
        architecture=name,
        model="LlamaForCausalLM",
        config={"num_key_value_heads": n_kv, "rms_norm_eps": 1e-6},
        keys=RMS_NORM | {"rope.dimension_count": 8, "attention.head_count_kv": n_kv},
        convert=dict if name == "exaone" else rows_beside({"q_proj": 4, "k_proj": n_kv}),
        not_in_llama_cpp="it knows those of 32 and 40 layers" if name == "baichuan" else "",
    )
    for name, n_kv in (("internlm2", 2), ("baichuan", 4), ("exaone", 2))
]

OLMO = [
    Peer(
        name="olmo",
        architecture="olmo",
        model="OlmoForCausalLM",
        config={"clip_qkv": 1.0},
        keys=LAYER_NORM | {"attention.clamp_kqv": 1.0},
        convert=QK_BESIDE,
    ),
    Peer(
        name="olmo3",
        architecture="olmo2",
        model="Olmo3ForCausalLM",
        config={"sliding_window": 8, "rms_norm_eps": 1e-6}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        keys=RMS_NORM
        | SLOW
        | {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False]},
    ),
]

DENSE = [*GPTNEOX, PHI2, STARCODER2, *STABLELM, *FALCON, *COMMAND_R, *LLAMAS, *OLMO]
DENSE += [COHERE2, NEMOTRON, STARCODER, BLOOM]
