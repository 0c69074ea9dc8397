"""Decoders with experts: mixtures alone, beside a shared expert, and after dense layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from zlib import crc32

import numpy as np

from peers.dense import QK_BESIDE
from peers.peer import Arrays, Peer, drawn
from peers.variants import YARN, YARN_KEYS

RMS_NORM = {"attention.layer_norm_rms_epsilon": 1e-6}
ROPE = {"rope.freq_base": 10000.0}
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
EXPERT_KEYS = {"expert_count": 6, "expert_used_count": 2}
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
QWEN_KEYS = {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 24}
SHARED = "mlp.shared_expert."
# Endings of transformers' names after "model.layers.N." -> GGUF's after "blk.N."
NAMES = {
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    f"{SHARED}gate_proj.weight": "ffn_gate_shexp.weight",
    f"{SHARED}up_proj.weight": "ffn_up_shexp.weight",
    f"{SHARED}down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
    "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
    "feed_forward.gate.weight": "ffn_gate_inp.weight",
    "feed_forward.experts.down_proj": "ffn_down_exps.weight",
    "feed_forward.expert_bias": "exp_probs_b.bias",
}
PACKED = {"experts.gate_up_proj": "exps", "shared_mlp.input_linear.weight": "shexp"}


ROUTERS = (
    "mlp.gate.weight",
    "mlp.router.weight",
    "feed_forward.gate.weight",
    "block_sparse_moe.router.weight",
)
Draw = Callable[[str, tuple[int, ...], np.random.Generator], np.ndarray]


def routed(seeds: Mapping[int, int], others: Draw = drawn) -> Draw:
    """Numbers of which those of routers have seeds of their own, by layer.

    Of thousands of seeds these leave the widest gap between the experts that a token gets and the
    others, with and without the adapter. Where the gap is small another rounding closes it, and a
    single other choice moves the gradients by up to two fifths of their norm.
    """

    def draw(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        if name.endswith(ROUTERS):
            rng = np.random.default_rng([crc32(name.encode()), seeds[int(name.split(".")[2])]])
        return others(name, shape, rng)

    return draw


def apart(state: Arrays) -> Arrays:
    """Gates and ups, which lie in one tensor, in two; GGUF's names for all parts of a mixture."""
    found = {}
    for name, array in state.items():
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        ending = next((e for e in PACKED if name.endswith(e)), None)
        if ending:
            gate, up = np.split(array, 2, axis=-2)
            found[f"blk.{layer}.ffn_gate_{PACKED[ending]}.weight"] = gate
            found[f"blk.{layer}.ffn_up_{PACKED[ending]}.weight"] = up
        else:
            found[f"blk.{layer}.{NAMES[rest]}" if rest in NAMES else name] = array
    return found


def beside(state: Arrays) -> Arrays:
    """The same, with q and k in the order of "normal" rotary pairs."""
    return apart(QK_BESIDE(state))


def in_blocks(state: Arrays) -> Arrays:
    """The same, with convolutions without their empty axis."""
    return {n: a[:, 0] if n.endswith("conv.conv.weight") else a for n, a in apart(state).items()}


def by_turns(state: Arrays) -> Arrays:
    """gpt-oss: gates and ups, which lie by turns and upright, apart and as rows."""
    found = {}
    for name, array in state.items():
        layer = f"blk.{name.removeprefix('model.layers.').partition('.')[0]}"
        part = "bias" if name.endswith("_bias") else "weight"
        rows = array.swapaxes(-1, -2) if array.ndim == 3 else array
        if ".experts.gate_up_proj" in name:
            found[f"{layer}.ffn_gate_exps.{part}"] = rows[:, ::2]
            found[f"{layer}.ffn_up_exps.{part}"] = rows[:, 1::2]
        elif ".experts.down_proj" in name:
            found[f"{layer}.ffn_down_exps.{part}"] = rows
        else:
            found[f"{name}.weight" if name.endswith("sinks") else name] = array
    return found


SCALES = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
SCALE_KEYS = {
    "attention.scale": 0.2,
    "embedding_scale": 3.0,
    "residual_scale": 0.7,
    "logit_scale": 2.0,
}


def granite(name: str, kind: str, config: dict, keys: dict, seeds: Mapping[int, int]) -> Peer:
    return Peer(
        name=name,
        architecture="granitemoe",
        model=f"{kind}ForCausalLM",
        config=SCALES | EXPERTS | config,
        keys=RMS_NORM | ROPE | SCALE_KEYS | EXPERT_KEYS | {"rope.dimension_count": 8} | keys,
        convert=beside,
        draw=routed(seeds),
    )


MIXTURES = [
    Peer(
        name="mixtral",
        architecture="llama",
        model="MixtralForCausalLM",
        config=EXPERTS,
        keys={"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e6}
        | {"rope.dimension_count": 8}
        | EXPERT_KEYS,
        convert=beside,
        draw=routed({0: 134, 1: 827}),
    ),
    Peer(
        name="qwen2moe",
        architecture="qwen2moe",
        model="Qwen2MoeForCausalLM",
        config=QWEN_EXPERTS | {"shared_expert_intermediate_size": 40},
        keys=RMS_NORM | ROPE | QWEN_KEYS | {"expert_shared_feed_forward_length": 40},
        convert=apart,
        draw=routed({0: 713, 1: 1014}),
        fixed=("norm.weight", "ffn_gate_inp_shexp.weight"),  # one row: no rank fits
    ),
    Peer(
        name="qwen3moe",
        architecture="qwen3moe",
        model="Qwen3MoeForCausalLM",
        config=QWEN_EXPERTS | {"head_dim": 16, "norm_topk_prob": True},
        keys=RMS_NORM
        | QWEN_KEYS
        | ROPE
        | {"attention.key_length": 16, "attention.value_length": 16},
        convert=apart,
        draw=routed({0: 744, 1: 1438}),
    ),
    Peer(
        name="olmoe",
        architecture="olmoe",
        model="OlmoeForCausalLM",
        config={"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False}
        | {"num_key_value_heads": 4, "pad_token_id": 1, "eos_token_id": 2},
        keys={"attention.layer_norm_rms_epsilon": 1e-5}
        | ROPE
        | {"attention.head_count_kv": 4, "expert_count": 6, "expert_used_count": 3},
        convert=apart,
        draw=routed({0: 2711, 1: 652}),
    ),
    Peer(
        name="lfm2moe",
        architecture="lfm2moe",
        model="Lfm2MoeForCausalLM",
        config={"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
        | {"num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24, "tie_word_embeddings": True, "eos_token_id": 2},
        keys={"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e6, "block_count": 3}
        | {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3, "expert_gating_func": 2}
        | {"leading_dense_block_count": 1, "expert_feed_forward_length": 24}
        | EXPERT_KEYS,
        convert=in_blocks,
        draw=routed({1: 1457, 2: 952}),
        fixed=("norm.weight", "shortconv.conv.weight"),
        buffers=("expert_bias",),
    ),
    Peer(
        name="gpt-oss",
        architecture="gpt-oss",
        model="GptOssForCausalLM",
        config=EXPERTS
        | {"head_dim": 16, "sliding_window": 5, "num_hidden_layers": 3, "rms_norm_eps": 1e-5}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": YARN | {"truncate": True}, "intermediate_size": 24}
        | {"pad_token_id": 0, "eos_token_id": 2},
        keys={"attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 5}
        | {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16}
        | {"block_count": 3, "feed_forward_length": 24, "expert_feed_forward_length": 24}
        | ROPE
        | YARN_KEYS
        | EXPERT_KEYS,
        convert=by_turns,
        draw=routed({0: 18354, 1: 23734, 2: 23861}),
        fixed=("norm.weight", "exps.bias"),
    ),
    granite("granitemoe", "GraniteMoe", {}, {}, {0: 382, 1: 524}),
    granite(
        "granitemoe-shared",
        "GraniteMoeShared",
        {"shared_intermediate_size": 24, "tie_word_embeddings": True},
        {"expert_shared_feed_forward_length": 24},
        {0: 245, 1: 710},
    ),
]
