"""Decoders whose blocks keep a state: convolutions, selective scans and delta rules."""

from __future__ import annotations

from typing import Any

import numpy as np

from peers.dense import RMS_NORM
from peers.experts import apart as experts_apart
from peers.experts import routed
from peers.peer import Arrays, Peer, drawn
from peers.variants import RMS_NORM_5, one_more

FIXED = ("norm.weight", "conv1d.weight", "shortconv.conv.weight", "ssm_a", "ssm_d")
ROUTED = (*FIXED, "ffn_gate_inp_shexp.weight")

LFM2 = Peer(
    name="lfm2",
    architecture="lfm2",
    model="Lfm2ForCausalLM",
    config={"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    keys={"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3, "rope.freq_base": 1e6}
    | RMS_NORM_5,
    convert=lambda state: {n: a[:, 0] if "conv.conv" in n else a for n, a in state.items()},
    fixed=FIXED,
)

# -- Mamba --------------------------------------------------------------------------------------

SSM: dict[str, Any] = {"ssm.conv_kernel": 4, "ssm.inner_size": 64}
NO_ATTENTION: dict[str, Any] = {"attention.head_count": 0, "attention.head_count_kv": None}
NO_ATTENTION |= {"feed_forward_length": 0}
MAMBA_KEYS = {"ssm.state_size": 4, "ssm.time_step_rank": 3} | SSM | NO_ATTENTION | RMS_NORM_5
MAMBA_CONFIG = {"state_size": 4, "intermediate_size": 64, "time_step_rank": 3}
GROUPS, HEADS = 2, 8


def minus_exp(x: np.ndarray) -> np.ndarray:
    """In PyTorch, whose e^x differs from NumPy's in the last bit."""
    import torch

    return -torch.exp(torch.from_numpy(np.array(x, np.float32))).numpy()


def as_rates(state: Arrays) -> Arrays:
    """Convolutions without their empty axis, A instead of the logarithm of −A."""
    found = {n.replace(".dt_bias", ".dt_proj.bias"): a for n, a in state.items()}
    found |= {n: minus_exp(a) for n, a in found.items() if "A_log" in n}
    return {n: a[:, 0] if "conv1d.weight" in n else a for n, a in found.items()}


def by_head(state: Arrays) -> Arrays:
    """As for Mamba 1; A and D are columns, the norm has a row for each group."""
    found = as_rates(state)
    found |= {n: a[:, None] for n, a in found.items() if n.endswith((".A_log", ".D"))}
    return {
        n: a.reshape(GROUPS, -1) if n.endswith("mixer.norm.weight") else a for n, a in found.items()
    }


MAMBAS = [
    Peer(
        name="mamba",
        architecture="mamba",
        model="MambaForCausalLM",
        config=MAMBA_CONFIG,
        keys=MAMBA_KEYS,
        convert=as_rates,
        fixed=FIXED,
    ),
    Peer(
        name="falcon-mamba",
        architecture="mamba",
        model="FalconMambaForCausalLM",
        config=MAMBA_CONFIG | {"mixer_rms_eps": 1e-5},
        keys=MAMBA_KEYS | {"ssm.dt_b_c_rms": True},
        convert=as_rates,
        fixed=FIXED,
    ),
    Peer(
        name="mamba2",
        architecture="mamba2",
        model="Mamba2ForCausalLM",
        config={"state_size": 6, "num_heads": HEADS, "head_dim": 8, "n_groups": GROUPS}
        | {"chunk_size": 8, "intermediate_size": 64},
        keys=SSM
        | {"ssm.state_size": 6, "ssm.time_step_rank": HEADS, "ssm.group_count": GROUPS}
        | NO_ATTENTION
        | RMS_NORM_5,
        convert=by_head,
        fixed=FIXED,
    ),
]

# -- gated delta nets ---------------------------------------------------------------------------

KEYS, VALUES, SIZE = 2, 6, 8
DELTA_CONFIG = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": SIZE,
    "linear_value_head_dim": SIZE,
    "linear_num_key_heads": KEYS,
    "linear_num_value_heads": VALUES,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
DELTA_KEYS: dict[str, Any] = {
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.recurrent_layers": [True, False],
    "rope.dimension_count": 4,
    "ssm.conv_kernel": 4,
    "ssm.group_count": KEYS,
    "ssm.inner_size": VALUES * SIZE,
    "ssm.state_size": SIZE,
    "ssm.time_step_rank": VALUES,
} | RMS_NORM


def apart(array: np.ndarray, axis: int) -> np.ndarray:
    """Heads of v with the same key, which lie together, as far apart as there are keys."""
    shape = array.shape
    heads = array.reshape(*shape[:axis], KEYS, VALUES // KEYS, -1, *shape[axis + 1 :])
    return heads.swapaxes(axis, axis + 1).reshape(shape)


def values_apart(state: Arrays) -> Arrays:
    """What the converter does for Qwen 3.5: its delta nets have their heads of v apart."""
    found = {}
    for name, array in as_rates(one_more_but_gated(state)).items():
        if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            n = 2 * KEYS * SIZE
            array = np.concatenate([array[:n], apart(array[n:], 0)])
        elif name.endswith(("linear_attn.A_log", "linear_attn.dt_proj.bias")) or (
            name.endswith(("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight"))
        ):
            array = apart(array, 0)
        elif name.endswith("linear_attn.out_proj.weight"):
            array = apart(array, 1)
        found[name] = array
    return found


def one_more_but_gated(state: Arrays) -> Arrays:
    """The norms behind delta nets are used as they are."""
    gated = {n: a for n, a in state.items() if n.endswith("linear_attn.norm.weight")}
    return one_more(state) | gated


def near_zero(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Norms get 1 when the class runs, but those behind delta nets."""
    values = drawn(name, shape, rng)
    return values - (name.endswith("norm.weight") and "linear_attn" not in name)


def keys_together(state: Arrays) -> Arrays:
    """Qwen 3 Next: q, k, v and z, which lie by keys, one after the other; z in its own matrix."""
    found = {}
    for name, array in experts_apart(as_rates(one_more_but_gated(state))).items():
        if not name.endswith("in_proj_qkvz.weight"):
            found[name] = array
            continue
        wide = VALUES // KEYS * SIZE
        parts = np.split(array.reshape(KEYS, -1, array.shape[1]), np.cumsum([SIZE, SIZE, wide]), 1)
        q, k, v, z = (part.reshape(-1, array.shape[1]) for part in parts)
        at = name.split(".")[2]
        found[f"blk.{at}.attn_qkv.weight"] = np.concatenate([q, k, v])
        found[f"blk.{at}.attn_gate.weight"] = z
    return found


EXPERTS_CONFIG = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS: dict[str, Any] = {"expert_count": 4, "expert_used_count": 2}
EXPERTS |= {"expert_feed_forward_length": 16}
SHARED_CONFIG = EXPERTS_CONFIG | {"shared_expert_intermediate_size": 24}
SHARED = EXPERTS | {"expert_shared_feed_forward_length": 24}
SECTIONS: dict[str, Any] = {"rope.dimension_sections": [1, 1, 0, 0]}

DELTA_NETS = [
    Peer(
        name="qwen35",
        architecture="qwen35",
        model="Qwen3_5ForCausalLM",
        config=DELTA_CONFIG,
        keys=DELTA_KEYS | SECTIONS,
        convert=values_apart,
        draw=near_zero,
        fixed=FIXED,
    ),
    Peer(
        name="qwen35moe",
        architecture="qwen35moe",
        model="Qwen3_5MoeForCausalLM",
        config=DELTA_CONFIG | SHARED_CONFIG,
        keys=DELTA_KEYS | SECTIONS | SHARED,
        convert=lambda state: experts_apart(values_apart(state)),
        draw=routed({0: 2560, 1: 2553}, near_zero),
        fixed=ROUTED,
    ),
    Peer(
        name="qwen3next",
        architecture="qwen3next",
        model="Qwen3NextForCausalLM",
        config=DELTA_CONFIG | SHARED_CONFIG,
        keys=DELTA_KEYS | SHARED,
        convert=keys_together,
        draw=routed({0: 151, 1: 1676}, near_zero),
        fixed=ROUTED,
    ),
]

RECURRENT = [LFM2, *MAMBAS, *DELTA_NETS]
