"""Which small models of transformers' classes are compared: their hyperparameters, and where a
class has another's name."""

from math import log
from typing import Any

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
