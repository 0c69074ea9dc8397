"""Small models of transformers' classes, and llama.cpp's own conversion of them.

The converter moves the numbers of a matrix to other places and computes none of them, so it
converts gradients too: a checkpoint whose numbers are the gradients becomes a file of them.

    PYTHONPATH=LLAMA_CPP:LLAMA_CPP/gguf-py     for `conversion`, and torch beside it
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from math import log, sqrt
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from pyggml.models.architectures import gemma3n

N_VOCAB, N_TOKENS = 40, 24
SIZES: dict[str, Any] = {
    "vocab_size": N_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,  # that of norms within parts, which the classes do not read
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
ROUTED = EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
GROUPED = ROUTED | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FULL_ROPE = ROPE | {"partial_rotary_factor": 0.5}
WHOLE_ROPE = ROPE | {"partial_rotary_factor": 1.0}
GRANITE_SWA = {
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention"],
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
NEMOTRON = {
    "layer_norm_epsilon": 1e-6,
    "time_step_min": 1e-30,  # below which the class lets no time step be; llama.cpp has none
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "use_mamba_kernels": False,
}
DEEPSEEK = ROUTED | {
    **{"num_key_value_heads": 4, "topk_method": "greedy", "norm_topk_prob": False},
    "mlp_layer_types": ["dense", "sparse"],
}
PICTURE = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
# The half of classes that reads pictures, which text does not pass: sizes.
PICTURES: dict[str, dict[str, Any]] = {
    "Qwen2VLForConditionalGeneration": PICTURE | {"depth": 1, "embed_dim": 32, "hidden_size": 64},
    "Qwen3VLForConditionalGeneration": PICTURE
    | {"depth": 1, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    "Qwen3VLMoeForConditionalGeneration": PICTURE
    | {"depth": 1, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    "Step3p7ForConditionalGeneration": PICTURE | {"num_hidden_layers": 1, "num_attention_heads": 2},
    "DeepseekOcr2ForConditionalGeneration": {
        "sam_config": PICTURE
        | {
            **{"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64},
            **{"output_channels": 8, "downsample_channels": [8, 32], "global_attn_indexes": [0]},
        },
        "encoder_config": PICTURE
        | {
            **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
            "vocab_size": N_VOCAB,
        },
    },
    **dict.fromkeys(
        (f"{x}ForConditionalGeneration" for x in ("HunYuanVL", "PaddleOCRVL", "MuseGlimmer")),
        PICTURE | {"num_hidden_layers": 1, "num_attention_heads": 2},
    ),
}
# transformers' class -> arguments of its config class besides SIZES.
MODELS: dict[str, dict[str, Any]] = {
    "ApertusForCausalLM": {},
    "Glm4MoeForCausalLM": GROUPED | {"head_dim": 16, "use_qk_norm": True},
    "MiniMaxM2ForCausalLM": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "rotary_dim": 16,
        "scoring_func": "sigmoid",
    },
    "Ernie4_5_MoeForCausalLM": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
    },
    "Dots1ForCausalLM": GROUPED | {"head_dim": 16, "scoring_func": "sigmoid"},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 16},
    "HunYuanMoEV1ForCausalLM": {
        "head_dim": 16,
        "num_experts": 4,
        "num_shared_expert": [1, 1],
        "moe_topk": [2, 2],
        "moe_intermediate_size": [96, 96],
    },
    "DeepseekV2ForCausalLM": LATENT | ROUTED | {"topk_method": "greedy", "norm_topk_prob": False},
    "DeepseekV3ForCausalLM": LATENT | GROUPED | {"scoring_func": "sigmoid"},
    "Glm4MoeLiteForCausalLM": LATENT | GROUPED | {"scoring_func": "sigmoid"},
    "Exaone4ForCausalLM": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "ExaoneMoeForCausalLM": GROUPED | {"num_experts": 8, "scoring_func": "sigmoid"},
    "GraniteMoeHybridForCausalLM": {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
        "mamba_expand": 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
    },
    "JambaForCausalLM": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 16,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "FalconH1ForCausalLM": {
        "head_dim": 16,
        "mamba_d_ssm": 128,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
    },
    "NemotronHForCausalLM": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "attention", "moe"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        **NEMOTRON,
    },
    "NemotronHDenseForCausalLM": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "attention", "mlp"],
        **NEMOTRON,
    },
    "AfmoeForCausalLM": EXPERTS
    | {
        "num_experts": 8,
        "head_dim": 16,
        "num_dense_layers": 1,
        "sliding_window": 8,
        "mup_enabled": True,
        "route_norm": True,
        "route_scale": 1.5,
        "score_func": "sigmoid",
    },
    "Llama4ForCausalLM": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "intermediate_size_mlp": 80,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
    },
    "Jais2ForCausalLM": {},
    "MellumForCausalLM": EXPERTS | {"num_experts": 4, "head_dim": 16, "sliding_window": 8},
    "HYV3ForCausalLM": EXPERTS | {"num_experts": 4, "head_dim": 16},
    "Gemma4ForCausalLM": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "final_logit_softcapping": 30.0,  # llama.cpp's where a file has none
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": N_VOCAB,
        "tie_word_embeddings": True,
    },
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 22,
        "head_dim": 16,
        "sliding_window": 8,
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 12,
        "num_kv_shared_layers": 2,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 4
        + ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": N_VOCAB,
        "tie_word_embeddings": True,
    },
    "PhimoeForCausalLM": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "lm_head_bias": True,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + i / 8 for i in range(8)],
            "long_factor": [1.0 + i / 2 for i in range(8)],
            # what the converter makes of 64 / 32, which the class is told
            **dict.fromkeys(("short_mscale", "long_mscale"), (1 + log(2) / log(32)) ** 0.5),
            "original_max_position_embeddings": 32,
        },
    },
    "DbrxForCausalLM": {
        **{"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
        "attn_config": {"clip_qkv": 1.5, "kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "Cohere2MoeForCausalLM": EXPERTS
    | {
        "head_dim": 16,
        "num_experts": 8,
        "num_shared_experts": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "sliding_window": 8,
        "expert_selection_fn": "sigmoid",
        "tie_word_embeddings": True,
        "prefix_dense_intermediate_size": 80,
    },
    "LagunaForCausalLM": EXPERTS
    | {
        "head_dim": 16,
        "num_experts": 8,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["full_attention", "sliding_attention"],
        "num_attention_heads_per_layer": [4, 8],
        "sliding_window": 8,
        "moe_routed_scaling_factor": 1.5,
        "gating": True,
    },
    "KimiLinearForCausalLM": LATENT
    | EXPERTS
    | {
        "q_lora_rank": None,
        "num_experts": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 4,
        "routed_scaling_factor": 1.5,
        "linear_attn_config": {
            "full_attn_layers": [2, 4],
            "kda_layers": [1, 3],
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    },
    "GraniteSWAForCausalLM": GRANITE_SWA,
    "GraniteMoeSWAForCausalLM": GRANITE_SWA
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    "Mistral4ForCausalLM": LATENT
    | ROUTED
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "SarvamMoEForCausalLM": EXPERTS | GROUPED | {"head_dim": 16},
    "BailingHybridForCausalLM": LATENT
    | EXPERTS
    | {
        **{"num_experts": 8, "num_shared_experts": 1, "num_expert_group": 4, "topk_group": 2},
        **{"head_dim": 16, "layer_group_size": 2, "num_hidden_layers": 4},
        "first_k_dense_replace": 1,
    },
    "MiMoV2FlashForCausalLM": EXPERTS
    | {
        **{"n_routed_experts": 8, "head_dim": 16, "v_head_dim": 12, "sliding_window": 8},
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": FULL_ROPE | {"rope_theta": 50000.0},
            "sliding_attention": FULL_ROPE,
        },
    },
    "Qwen2VLForConditionalGeneration": {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}},
    "Qwen3VLForConditionalGeneration": {
        "head_dim": 16,
        "rope_parameters": ROPE | {"mrope_section": [3, 3, 2], "mrope_interleaved": True},
    },
    "Qwen3VLMoeForConditionalGeneration": EXPERTS
    | {
        **{"head_dim": 16, "num_experts": 8},
        "rope_parameters": ROPE | {"mrope_section": [3, 3, 2], "mrope_interleaved": True},
    },
    "Step3p7ForConditionalGeneration": EXPERTS
    | {
        **{"n_routed_experts": 8, "share_expert_dim": 32, "head_dim": 16, "sliding_window": 8},
        **{"num_hidden_layers": 3, "num_sliding_attention_heads": 6},
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "moe_router_scaling_factor": 1.5,
        **{"swiglu_limits": [0.0, 0.5, 0.3], "swiglu_limits_shared": [0.0, 0.4, 0.0]},
        "rope_parameters": {
            "full_attention": FULL_ROPE | {"rope_theta": 50000.0},
            "sliding_attention": WHOLE_ROPE,
        },
    },
    "DeepseekOcr2ForConditionalGeneration": DEEPSEEK,
    "HunYuanVLForConditionalGeneration": {
        "head_dim": 16,
        "rope_parameters": ROPE | {"mrope_section": [3, 3, 2, 0]},
    },
    "PaddleOCRVLForConditionalGeneration": {
        "head_dim": 16,
        "rope_parameters": ROPE | {"mrope_section": [2, 3, 3]},
    },
    "MuseGlimmerForConditionalGeneration": {
        **{"head_dim": 16, "sliding_window": 8},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "GlmForCausalLM": {"head_dim": 16, "attention_bias": True},
    "MiniCPM3ForCausalLM": LATENT | {"v_head_dim": 16},
    "BitNetForCausalLM": {"tie_word_embeddings": True, "hidden_act": "silu"},  # as llama.cpp
    "MptForCausalLM": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    # Of classes that come with their models, those that compute what one of transformers does.
    "XverseForCausalLM": {"num_key_value_heads": 4},
    "DeciLMForCausalLM": {},
    "PanguEmbeddedForCausalLM": {"attention_bias": True},
    "OrionForCausalLM": {"layer_norm_eps": 1e-6, "rope_parameters": WHOLE_ROPE},
    "MiniCPMForCausalLM": {
        **{"embedding_multiplier": 3.0, "residual_multiplier": 0.5},
        **{"attention_multiplier": 0.25, "logits_scaling": 2.0},
    },
    "DeepseekForCausalLM": DEEPSEEK,
    "BailingMoeForCausalLM": DEEPSEEK | {"mlp_layer_types": ["sparse"] * 2},
    "QWenLMHeadModel": {"num_key_value_heads": 4},
}
OF_PICTURES = ("DeepseekForCausalLM", "BailingMoeForCausalLM")
PICTURES |= dict.fromkeys(OF_PICTURES, PICTURES["DeepseekOcr2ForConditionalGeneration"])
# Where a class has another's name, and a config of its own.
LLAMAS = ("Xverse", "DeciLM", "PanguEmbedded")
CLASS_OF = {
    "SarvamMoEForCausalLM": "Glm4MoeForCausalLM",
    "NemotronHDenseForCausalLM": "NemotronHForCausalLM",
    **dict.fromkeys((f"{x}ForCausalLM" for x in LLAMAS), "LlamaForCausalLM"),
    "OrionForCausalLM": "StableLmForCausalLM",
    "MiniCPMForCausalLM": "GraniteForCausalLM",
    **dict.fromkeys(OF_PICTURES, "DeepseekOcr2ForConditionalGeneration"),
    "QWenLMHeadModel": "Qwen2ForCausalLM",
}
CONFIG_OF = {"SarvamMoEForCausalLM": "SarvamMoEConfig"}
# What the converter reads besides, or under other names, and `architectures` if it has another;
# it is not to see what is None.
SIGMOID = {"score_function": "sigmoid"}
OF_CONVERTER: dict[str, dict[str, Any]] = {
    "PhimoeForCausalLM": {"architectures": ["PhiMoEForCausalLM"]},
    "Mistral4ForCausalLM": {"architectures": ["Mistral3ForConditionalGeneration"]},
    "MptForCausalLM": {"architectures": ["MPTForCausalLM"]},
    "BailingHybridForCausalLM": {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "no_kda_lora": True,
        "gated_attention_proj_granularity_type": "head_wise",
        **SIGMOID,
        "n_group": 4,
        "moe_shared_expert_intermediate_size": 32,
    },
    "SarvamMoEForCausalLM": SIGMOID | {"num_experts": 8, "num_shared_experts": 1},
    "KimiLinearForCausalLM": SIGMOID,
    "GlmForCausalLM": {"layernorm_epsilon": 1e-6},
    "OrionForCausalLM": {"rms_norm_eps": 1e-6},
    "BailingMoeForCausalLM": {
        **{"first_k_dense_replace": 0, "num_experts": 8, "num_shared_experts": 1},
    },
    "QWenLMHeadModel": {"intermediate_size": 2 * 96, "layer_norm_epsilon": 1e-6},
    "MiniCPMForCausalLM": {"scale_emb": 3.0, "scale_depth": 0.5 * sqrt(2), "dim_model_base": 32},
    "NemotronHDenseForCausalLM": {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "M*-",
        **dict.fromkeys(("num_experts_per_tok", "n_routed_experts", "n_shared_experts")),
    },
    "DeepseekOcr2ForConditionalGeneration": {
        "architectures": ["DeepseekOCRForCausalLM"],
        "qk_rope_head_dim": 16,
    },
    "Step3p7ForConditionalGeneration": {
        **{"num_attention_groups": 2, "moe_num_experts": 8, "moe_top_k": 2},
        "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2},
        "partial_rotary_factors": [0.5, 1.0, 0.5],
        "moe_layers_enum": "1,2",
        "norm_expert_weight": True,
    },
    "MiMoV2FlashForCausalLM": {
        **{"swa_head_dim": 16, "swa_num_attention_heads": 4, "swa_v_head_dim": 12},
        **{"topk_method": "noaux_tc", "swa_num_key_value_heads": 4},
        **{"hybrid_layer_pattern": [0, 1], "layernorm_epsilon": 1e-6},
        "rope_parameters": FULL_ROPE | {"rope_theta": 50000.0},
    },
}
# Keys that llama.cpp's converter of Mistral's own files writes and that of transformers' does not.
KEYS = {
    "Mistral4ForCausalLM": {"attention.temperature_scale": 0.1, "attention.temperature_length": 16}
}
# Names that save_pretrained gives modules, where they are not those of published files; "" is left
# out.
TOWERS = r".*(sam_model|qwen2_model|projector|view_seperator).*"
BAILING = {
    "self_attn.o_proj": "attention.dense",
    "model.embed_tokens": "model.word_embeddings",
}
QWEN = {
    "model.layers": "transformer.h",
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.gate_proj": "mlp.w2",
    "mlp.up_proj": "mlp.w1",
    "mlp.down_proj": "mlp.c_proj",
}
SUB_NORMS = {
    "self_attn.attn_sub_norm": "self_attn.inner_attn_ln",
    "mlp.ffn_sub_norm": "mlp.ffn_layernorm",
}


def by_name(names: Mapping[str, str], dropped: str = "") -> tuple[str, Callable[[re.Match], str]]:
    """A pattern of these names and of what is left out, and what they become."""
    return "|".join(filter(None, (dropped, *map(re.escape, names)))), lambda m: names.get(m[0], "")


RENAMED: dict[str, tuple[str, str | Callable[[re.Match], str]]] = {
    "BitNetForCausalLM": by_name(SUB_NORMS),
    "DeepseekForCausalLM": (TOWERS, ""),
    "BailingMoeForCausalLM": by_name(BAILING, TOWERS),
    "QWenLMHeadModel": by_name(QWEN),
    "KimiLinearForCausalLM": (r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj"),
}
# Queries, keys and values where they are one module in published files.
JOINED = {
    "BailingMoeForCausalLM": "attention.query_key_value",
    "QWenLMHeadModel": "attn.c_attn",
}


def torch_model(name: str) -> Any:
    """A model of the class with drawn weights, the same every time, in float32."""
    import torch
    import transformers

    kind = getattr(transformers, CLASS_OF.get(name, name))
    config_class = getattr(transformers, CONFIG_OF.get(name, ""), kind.config_class)
    sizes = SIZES | MODELS[name]
    if name in PICTURES:
        halves = {"text_config": sizes, "vision_config": PICTURES[name]}
        sizes = halves | {"tie_word_embeddings": False}
    config = config_class(**sizes)
    torch.manual_seed(0)  # some classes draw norms, biases and states
    config._attn_implementation = config._experts_implementation = "eager"
    model = kind(config).eval().float()
    as_llama_cpp(model)
    learned = {n: b for n, b in model.named_buffers() if n.endswith("correction_bias")}
    for weight, p in (dict(model.named_parameters()) | learned).items():
        rng = np.random.default_rng(crc32(weight.encode()))
        drawn = torch.from_numpy(rng.standard_normal(tuple(p.shape), np.float32))
        value = drawn * p.shape[-1] ** -0.5 if p.dim() > 1 else p.data + 0.1 * drawn
        p.data = value.bfloat16().float()  # the converter rounds some tables
    return model


def as_llama_cpp(model: Any) -> None:
    """Put llama.cpp's decisions where it differs from the class: GELUs are the tanh form;
    phimoe has RMS norms with biases and the usual router."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.GELU):
            module.approximate = "tanh"
    if type(model).__name__ == "PhimoeForCausalLM":
        from transformers.models.phimoe import modeling_phimoe

        modeling_phimoe.sparsemixer = usual_router
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.forward = partial(rms_norm, module)


def usual_router(scores: Any, top_k: int, **_: Any) -> tuple[Any, Any]:
    best, ids = scores.softmax(-1).topk(top_k)
    return best / best.sum(-1, keepdim=True), ids


def rms_norm(module: Any, x: Any) -> Any:
    return (
        x * (x.square().mean(-1, keepdim=True) + module.eps).rsqrt() * module.weight + module.bias
    )


def logits_and_grads(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits (T, n_vocab); the gradients of the loss are left in the parameters' grad."""
    import torch

    ids = torch.from_numpy(tokens)[None].long()
    logits = model(input_ids=ids, use_cache=False).logits[0]
    torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).backward()
    return logits.detach().numpy()


def as_deviations(monkeypatch: Any, name: str) -> None:
    """Gemma 3n's deviations are of n in transformers, of n - 1 in llama.cpp and here."""
    if name == "Gemma3nForCausalLM":
        n = SIZES["intermediate_size"]
        monkeypatch.setattr(gemma3n, "DEVIATIONS", gemma3n.DEVIATIONS * sqrt((n - 1) / n))


def put_grads(model: Any) -> None:
    """Every weight becomes its gradient."""
    import torch

    for p in model.parameters():
        p.data = torch.zeros_like(p.data) if p.grad is None else p.grad.clone()


def convert(model: Any, name: str, folder: Path) -> Path:
    """The F32 file that llama.cpp's converter makes of a model; it has no vocabulary."""
    import gguf
    from conversion import ModelType, get_model_architecture, get_model_class
    from conversion.base import ModelBase

    def no_vocabulary(self: Any) -> None:
        self.gguf_writer.add_tokenizer_model("no_vocab")
        self.gguf_writer.add_vocab_size(N_VOCAB)
        for key, value in KEYS.get(name, {}).items():
            of_type = type(value).__name__
            add = {"int": self.gguf_writer.add_uint32, "float": self.gguf_writer.add_float32}[
                of_type
            ]
            add(f"{self.gguf_writer.arch}.{key}", value)

    model.save_pretrained(folder)
    hparams: Mapping[str, Any] = ModelBase.load_hparams(folder, False)
    others = OF_CONVERTER.get(name, {})
    hparams = hparams | MODELS[name] | {"architectures": [name]} | others
    hparams = {k: v for k, v in hparams.items() if k not in others or v is not None}
    words = {"model": {"vocab": {str(i): i for i in range(N_VOCAB)}}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    (folder / "config.json").write_text(json.dumps(hparams))
    kind = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    kind = getattr(kind, name.replace("ForCausalLM", "Model"), kind)  # of several in one
    kind.set_vocab, kind.no_mtp = no_vocabulary, True
    if hasattr(kind, "weight_quant"):  # BitNet's own rounding, which is no moving of numbers
        kind.weight_quant = lambda self, weight: weight
    if name in RENAMED:
        kind = renaming(kind, *RENAMED[name], JOINED.get(name))
    if name == "Qwen3VLMoeForConditionalGeneration":
        kind = transposing(kind)
    path = folder / "model.gguf"
    kind(folder, gguf.LlamaFileType.ALL_F32, path, eager=True, hparams=hparams).write()
    return path


def renaming(kind: Any, pattern: str, name: Any, of_qkv: str | None) -> Any:
    """A converter that reads tensors of other names, or queries, keys and values as one."""

    class Renaming(kind):
        model_arch = kind.model_arch

        def index_tensors(self, *args: Any, **options: Any) -> dict[str, Any]:
            tensors = super().index_tensors(*args, **options)
            renamed = {re.sub(pattern, name, n): t for n, t in tensors.items()}
            if of_qkv is not None:
                join(renamed, of_qkv)
            return {n: t for n, t in renamed.items() if n}

    return Renaming


def join(tensors: dict[str, Any], name: str) -> None:
    """Put queries, keys and values below each other, as a module of this name."""
    import torch

    for q in [n for n in tensors if "self_attn.q_proj" in n]:
        some = [tensors.pop(q.replace("q_proj", f"{x}_proj")) for x in "qkv"]
        tensors[q.replace("self_attn.q_proj", name)] = partial(
            lambda some: torch.cat([make() for make in some]), some
        )


def transposing(kind: Any) -> Any:
    """A converter that reads experts as save_pretrained lays them out: published files have them
    transposed, which transformers undoes as it loads them and does not do again."""

    class Transposing(kind):
        model_arch = kind.model_arch

        def modify_tensors(self, data: Any, name: str, bid: int | None) -> Any:
            data = data.transpose(1, 2).contiguous() if ".mlp.experts." in name else data
            return super().modify_tensors(data, name, bid)

    return Transposing
