"""The modules of models' classes that adapters update, by architecture.

A module's rows may lie in another order than those of its tensor in a GGUF file, its columns too,
and one module may be several tensors.

Source: transformers' model classes; where it has none, the names that llama.cpp's converter reads
(conversion/*.py, gguf-py/gguf/tensor_mapping.py), which are those of the authors' own classes.
"""

from collections.abc import Container, Mapping
from dataclasses import replace

from pyggml.lora.peft.layout import ModuleLayout, Tensors
from pyggml.lora.peft.orders import (
    Order,
    halves_by_layer,
    joined_groups,
    k_pairs,
    keys_together,
    negated_k,
    negated_q,
    paired_groups,
    pairs_and_values,
    q_pairs,
    qk_and_values_apart,
    queries_by_group,
    turns,
    values_apart,
)


def _split(*names: str) -> Tensors:
    """One module that is these tensors."""
    return (names,)


_Q, _K, _V, _O = (f"self_attn.{x}_proj" for x in "qkvo")
_QKV = (_Q, _K, _V)
_GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_GATE = ("self_attn.g_proj",)
_THREE = ("gate_proj", "up_proj", "down_proj")
_SHARED = (*(f"mlp.shared_expert.{x}" for x in _THREE), "mlp.shared_expert_gate")
_FEED_FORWARD = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_BY_NUMBER = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
_DELTA = tuple(f"linear_attn.{x}" for x in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
_OUT = "linear_attn.out_proj"
_QKVZ = "linear_attn.in_proj_qkvz"
_PAIRED: dict[str, Order] = {_Q: q_pairs, _K: k_pairs}
_APART: dict[str, Order] = dict.fromkeys(_DELTA[1:], values_apart)
_APART[_DELTA[0]] = qk_and_values_apart
_INPUT, _OUTPUT = "shared_mlp.input_linear", "shared_mlp.output_linear"
_SHARED_MLP = {
    _INPUT: (("ffn_gate_shexp", "ffn_up_shexp"), ("ffn_gate", "ffn_up")),
    _OUTPUT: (("ffn_down_shexp",), ("ffn_down",)),
}
_THIRDS = _split("attn_q", "attn_k", "attn_v")
_EITHER = (*_split("attn_qkv"), *_THIRDS)

_LATENT_Q = ("self_attn.q_a_proj", "self_attn.q_b_proj", _Q)
_LATENT = ("self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", _O)
_SHARED_EXPERTS = tuple(f"mlp.shared_experts.{x}" for x in _THREE)
_LATENT_MIXTURE = ModuleLayout(modules=(*_LATENT_Q, *_LATENT, *_GATED, *_SHARED_EXPERTS))
_KIMI = tuple(f"self_attn.{x}_proj" for x in ("g_a", "g_b", "b"))
_FORGET = {f"self_attn.forget_gate.f_{x}_proj": _split(f"ssm_f_{x}") for x in "ab"}
_MAMBA_2 = ("mamba.in_proj", "mamba.out_proj")
_RWKV_TIME = ("receptance", "key", "value", "gate", "output")
_GEMMA_OUTER = ("model.embed_tokens", "lm_head", "model.per_layer_model_projection")
_GEMMA_TENSORS = {"model.per_layer_model_projection": _split("per_layer_model_proj")}

_BY_ITSELF = "the class multiplies by its weight itself, so it counts once PEFT has merged it"
_REFUSED = "PEFT refuses to load it beside layers of Mamba: train without it, or merge it here"
_PLAIN = ModuleLayout(modules=(*_QKV, _O, *_GATED))
_LLAMA = replace(_PLAIN, rows=_PAIRED)
# The text of a class that reads pictures too.
_TEXT = replace(
    _PLAIN,
    layers="model.language_model.layers",
    outer=("model.language_model.embed_tokens", "lm_head"),
)
_MIXTURE = replace(_PLAIN, modules=(*_PLAIN.modules, *_SHARED_EXPERTS))
_BY_WEIGHT = tuple(f".{x}" for x in _THREE)
_FUSED_MIXTURE = replace(_MIXTURE, by_weight=_BY_WEIGHT)
_APART_MIXTURE = replace(_MIXTURE, apart=_THREE)
_GLM = ModuleLayout(modules=(*_QKV, _O, "mlp.gate_up_proj", "mlp.down_proj"))
_GPT2 = ModuleLayout(
    layers="transformer.h",
    modules=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    outer=("transformer.wte", "lm_head"),
    conv1d=True,
)
_LFM2 = ModuleLayout(
    modules=(*_QKV, "self_attn.out_proj", *_BY_NUMBER, "conv.in_proj", "conv.out_proj"),
    experts="feed_forward.experts",
)
_MAMBA = ModuleLayout(
    layers="backbone.layers",
    modules=tuple(f"mixer.{x}_proj" for x in ("in", "x", "dt", "out")),
    outer=("backbone.embeddings", "lm_head"),
    warned={".dt_proj": _BY_ITSELF, ".out_proj": _REFUSED},
)
_BLOOM = ModuleLayout(
    layers="transformer.h",
    modules=("self_attention.query_key_value", "self_attention.dense", *_FEED_FORWARD),
    outer=("transformer.word_embeddings", "lm_head"),
    rows={"self_attention.query_key_value": joined_groups},
)
_GRANITE = ModuleLayout(
    modules=(*_LLAMA.modules, *_MAMBA_2, _INPUT, _OUTPUT),
    rows=_PAIRED,
    tensors=_SHARED_MLP,
    experts="block_sparse_moe.experts",
)
_NEMOTRON_H = ModuleLayout(
    modules=(
        *(f"mixer.{x}_proj" for x in ("in", "out", "q", "k", "v", "o", "up", "down")),
        *("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
        *("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
    ),
    outer=("model.embeddings", "lm_head"),
    rows={"mixer.q_proj": q_pairs, "mixer.k_proj": k_pairs},
    tensors={
        "model.embeddings": _split("token_embd"),
        **{f"mixer.{x}_proj": _split(f"ssm_{x}") for x in ("in", "out")},
        **{f"mixer.{x}_proj": _split(f"attn_{x}") for x in "qkv"},
        "mixer.o_proj": _split("attn_output"),
        **{f"mixer.{x}_proj": _split(f"ffn_{x}") for x in ("up", "down")},
        **{f"mixer.shared_experts.{x}_proj": _split(f"ffn_{x}_shexp") for x in ("up", "down")},
        "mixer.fc1_latent_proj": _split("ffn_latent_down"),
        "mixer.fc2_latent_proj": _split("ffn_latent_up"),
    },
    warned={".out_proj": _REFUSED},
    experts="mixer.experts",
)

_OF_TRANSFORMERS: dict[str, ModuleLayout] = {
    **dict.fromkeys(("llama", "mistral3", "granite", "olmo", "smollm3", "arcee"), _LLAMA),
    **dict.fromkeys(("qwen2", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "olmo2"), _PLAIN),
    **dict.fromkeys(("olmoe", "stablelm", "command-r", "cohere2", "nemotron"), _PLAIN),
    **dict.fromkeys(("ernie4_5", "seed_oss", "apertus", "bitnet", "exaone4"), _PLAIN),
    **dict.fromkeys(("hunyuan-dense", "jais2", "mellum", "minimax-m2", "mimo2"), _PLAIN),
    **dict.fromkeys(
        ("dots1", "ernie4_5-moe", "exaone-moe", "glm4moe", "cohere2moe"), _FUSED_MIXTURE
    ),
    "hy_v3": _MIXTURE,
    **dict.fromkeys(("qwen2vl", "qwen3vl", "qwen3vlmoe", "paddleocr", "hunyuan_vl"), _TEXT),
    "phimoe": replace(_PLAIN, modules=(*_QKV, _O, "mlp.router"), by_weight=(".router",)),
    "laguna": replace(
        _MIXTURE,
        modules=(*_MIXTURE.modules, *_GATE),
        stored=("mlp.shared_experts.", "mlp.shared_expert."),
    ),
    "afmoe": replace(
        _FUSED_MIXTURE, modules=(*_MIXTURE.modules, "self_attn.gate_proj", "mlp.router.gate")
    ),
    "muse-glimmer": replace(_TEXT, modules=(*_PLAIN.modules, "self_attn.gate_proj"), rows=_PAIRED),
    "deepseek2-ocr": replace(
        _TEXT, modules=_MIXTURE.modules, stored=("model.language_model.", "model.")
    ),
    "step35": replace(_TEXT, modules=(*_MIXTURE.modules, *_GATE)),
    "hunyuan-moe": replace(
        _PLAIN,
        modules=(*_QKV, _O, "mlp.gate.wg", *(f"mlp.shared_mlp.{x}" for x in _THREE)),
        by_weight=_BY_WEIGHT,
    ),
    "llama4": ModuleLayout(
        modules=(
            *(*_QKV, _O, "feed_forward.router"),
            *(f"feed_forward.{x}" for x in _THREE),
            *(f"feed_forward.shared_expert.{x}" for x in _THREE),
        ),
        experts="feed_forward.experts",
        upright=True,
        by_weight=(".router",),
    ),
    "gemma3n": ModuleLayout(
        modules=(
            *_PLAIN.modules,
            *("per_layer_input_gate", "per_layer_projection"),
            *("laurel.linear_left", "laurel.linear_right"),
            *(f"altup.{x}" for x in ("modality_router", "prediction_coefs", "correction_coefs")),
        ),
        outer=_GEMMA_OUTER,
        tensors=_GEMMA_TENSORS,
        lists={
            "model.altup_projections": "altup_proj",
            "model.altup_unembed_projections": "altup_unembd_proj",
        },
    ),
    "gemma4": ModuleLayout(
        modules=(*_PLAIN.modules, "per_layer_input_gate", "per_layer_projection", "router.proj"),
        outer=_GEMMA_OUTER,
        tensors=_GEMMA_TENSORS,
        experts="experts",
    ),
    "gpt-oss": replace(_PLAIN, gate_up=turns),
    "qwen2moe": ModuleLayout(modules=(*_PLAIN.modules, *_SHARED)),
    "granitemoe": _GRANITE,
    "granitehybrid": _GRANITE,
    "granite_swa": replace(
        _GRANITE,
        modules=(*_LLAMA.modules, _INPUT, _OUTPUT),
        rows=_PAIRED,
        tensors={_INPUT: _split("ffn_up_shexp"), _OUTPUT: _split("ffn_down_shexp")},
    ),
    "jamba": ModuleLayout(
        modules=(
            *(*_QKV, _O, *_MAMBA_2, "mamba.x_proj", "mamba.dt_proj"),
            *(f"feed_forward.{x}" for x in _THREE),
        ),
        experts="feed_forward.experts",
        warned={".dt_proj": _BY_ITSELF},
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "qwen35": ModuleLayout(
        modules=(*_PLAIN.modules, *_DELTA, _OUT), rows=_APART, columns={_OUT: values_apart}
    ),
    "qwen35moe": ModuleLayout(
        modules=(*_QKV, _O, *_SHARED, *_DELTA, _OUT), rows=_APART, columns={_OUT: values_apart}
    ),
    "qwen3next": ModuleLayout(
        modules=(*_QKV, _O, *_SHARED, _QKVZ, "linear_attn.in_proj_ba", _OUT),
        rows={_QKVZ: keys_together},
        tensors={_QKVZ: _split("attn_qkv", "attn_gate")},
        by_weight=_BY_WEIGHT,
    ),
    "deepseek2": replace(_LATENT_MIXTURE, by_weight=_BY_WEIGHT),
    "mistral4": _LATENT_MIXTURE,
    "minicpm3": ModuleLayout(modules=(*_LATENT_Q, *_LATENT, *_GATED)),
    "kimi-linear": ModuleLayout(
        modules=(*_QKV, *_LATENT, *_KIMI, *_FORGET, *_GATED, *_SHARED_EXPERTS), tensors=_FORGET
    ),
    "bailingmoe3": ModuleLayout(
        modules=(
            *(*_LATENT_Q, *_QKV[1:], *_LATENT, "self_attn.forget_gate.f_proj", *_GATE),
            *("self_attn.b_proj", *_GATED, *_SHARED_EXPERTS),
        ),
        tensors={
            "self_attn.forget_gate.f_proj": _split("ssm_f_a"),
            "self_attn.g_proj": (("attn_gate",), ("ssm_g_a",)),
        },
    ),
    "phi2": ModuleLayout(modules=(*_QKV, "self_attn.dense", "mlp.fc1", "mlp.fc2")),
    "phi3": ModuleLayout(modules=("self_attn.qkv_proj", _O, "mlp.gate_up_proj", "mlp.down_proj")),
    "glm4": _GLM,
    "chatglm": _GLM,
    "starcoder2": ModuleLayout(modules=(*_QKV, _O, "mlp.c_fc", "mlp.c_proj")),
    "lfm2": _LFM2,
    "lfm2moe": _LFM2,
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "gpt2": _GPT2,
    "starcoder": replace(_GPT2, conv1d=False),
    "mpt": ModuleLayout(
        layers="transformer.blocks",
        modules=("attn.Wqkv", "attn.out_proj", "ffn.up_proj", "ffn.down_proj"),
        outer=("transformer.wte", "lm_head"),
    ),
    "dbrx": ModuleLayout(
        layers="transformer.blocks",
        modules=("norm_attn_norm.attn.Wqkv", "norm_attn_norm.attn.out_proj", "ffn.router.layer"),
        outer=("transformer.wte", "lm_head"),
        experts="",
    ),
    "bloom": _BLOOM,
    "falcon": _BLOOM,
    "gptneox": ModuleLayout(
        layers="gpt_neox.layers",
        modules=("attention.query_key_value", "attention.dense", *_FEED_FORWARD),
        outer=("gpt_neox.embed_in", "lm_head"),
        rows={"attention.query_key_value": joined_groups},
    ),
}

_MUP = "the converter multiplies it by a number that the file does not have"
_PLAMO = ModuleLayout(
    layers="model.layers.layers",
    modules=(
        *("mixer.qkv_proj", "mixer.o_proj", "mixer.in_proj", "mixer.bcdt_proj", "mixer.dt_proj"),
        *("mixer.out_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    ),
)
_TALKIE = {
    **{f"attn.attn_{x}": _split(f"attn_{x[0]}") for x in ("query", "key", "value")},
    "attn.attn_resid": _split("attn_output"),
    "mlp.mlp_gate": _split("ffn_gate"),
    "mlp.mlp_linear": _split("ffn_up"),
    "mlp.mlp_resid": _split("ffn_down"),
    "model.embed": _split("token_embd"),
}
_RWKV7 = {
    **{f"attn.{x[0]}_proj": _split(f"time_mix_{x}") for x in _RWKV_TIME if x != "gate"},
    "ffn.key": _split("channel_mix_key"),
    "ffn.value": _split("channel_mix_value"),
}
_TIME_MIXER = {
    f"self_attn.time_mixer.{x}": _split(f"time_mix_{x}") for x in _RWKV_TIME if x != "gate"
}

# Of classes that come with their models.
OF_AUTHORS: dict[str, ModuleLayout] = {
    **dict.fromkeys(("orion", "pangu-embedded", "maincoder"), _PLAIN),
    **dict.fromkeys(("minicpm", "xverse", "deci", "nanbeige"), _LLAMA),
    "plm": ModuleLayout(modules=(_Q, *_LATENT, "mlp.up_proj", "mlp.down_proj")),
    "deepseek": replace(_APART_MIXTURE, rows=_PAIRED),
    "maple": replace(_PLAIN, modules=(*_QKV, _O, "mlp.gate"), apart=_THREE),
    "grovemoe": replace(
        _PLAIN, modules=(*_QKV, _O, "mlp.gate"), apart=_THREE, chunks="mlp.chunk_experts"
    ),
    "smallthinker": replace(
        _PLAIN,
        modules=(*_QKV, _O, "block_sparse_moe.primary_router"),
        experts="block_sparse_moe.experts",
        apart=("gate", "up", "down"),
    ),
    "arctic": ModuleLayout(
        modules=(
            *(*_QKV, _O, "block_sparse_moe.gate"),
            *(f"residual_mlp.{x}" for x in ("w1", "w2", "w3")),
        ),
        rows=_PAIRED,
        experts="block_sparse_moe.experts",
        apart=("w1", "w3", "w2"),
    ),
    "bailingmoe": ModuleLayout(
        modules=("attention.query_key_value", "attention.dense", *_GATED, *_SHARED_EXPERTS),
        outer=("model.word_embeddings", "lm_head"),
        changed={"lm_head": "the converter may divide its columns by their lengths (norm_head)"},
        rows={"attention.query_key_value": pairs_and_values},
        tensors={"attention.query_key_value": _THIRDS, "attention.dense": _split("attn_output")},
        apart=_THREE,
    ),
    "bailingmoe2": ModuleLayout(
        modules=("attention.query_key_value", "attention.dense", *_GATED, *_SHARED_EXPERTS),
        outer=("model.word_embeddings", "lm_head"),
        apart=_THREE,
        in_thirds=True,  # transformers' Sarvam, which is its Glm4Moe
    ),
    "grok": ModuleLayout(
        layers="transformer.decoder_layer",
        modules=(
            *(f"multi_head_attention.{x}" for x in ("query", "key", "value", "linear")),
            "router",
        ),
        outer=("transformer.in_out_embed", "lm_head"),
        experts="moe",
        apart=("linear", "linear_v", "linear_1"),
    ),
    "exaone": ModuleLayout(
        layers="transformer.h",
        modules=(
            *(f"attn.attention.{x}_proj" for x in ("q", "k", "v", "out")),
            *("mlp.c_fc_0", "mlp.c_fc_1", "mlp.c_proj"),
        ),
        outer=("transformer.wte", "lm_head"),
    ),
    "internlm2": ModuleLayout(
        modules=("attention.wqkv", "attention.wo", *_BY_NUMBER),
        outer=("model.tok_embeddings", "output"),
        rows={"attention.wqkv": paired_groups},
        tensors={"attention.wqkv": _THIRDS},
    ),
    "baichuan": ModuleLayout(
        modules=("self_attn.W_pack", _O, *_GATED),
        rows={"self_attn.W_pack": pairs_and_values},
        tensors={"self_attn.W_pack": _THIRDS},
    ),
    "codeshell": replace(_GPT2, conv1d=False, tensors={"attn.c_attn": _EITHER}),
    "jais": replace(
        _GPT2,
        modules=(*_GPT2.modules, "mlp.c_fc2"),
        changed={"transformer.wte": _MUP, "lm_head": _MUP},
    ),
    "qwen": replace(
        _GPT2,
        modules=("attn.c_attn", "attn.c_proj", "mlp.w1", "mlp.w2", "mlp.c_proj"),
        conv1d=False,
    ),
    "refact": replace(
        _GPT2,
        modules=("attn.q", "attn.kv", "attn.c_proj", "mlp.gate_up_proj", "mlp.c_proj"),
        tensors={
            "attn.q": _split("attn_q"),
            "attn.kv": _split("attn_k", "attn_v"),
            "mlp.gate_up_proj": _split("ffn_gate", "ffn_up"),
        },
        conv1d=False,
    ),
    "openelm": ModuleLayout(
        layers="transformer.layers",
        modules=("attn.qkv_proj", "attn.out_proj", "ffn.proj_1", "ffn.proj_2"),
        outer=("transformer.token_embeddings",),
        tensors={"ffn.proj_1": _split("ffn_gate", "ffn_up")},
    ),
    "spark2_5": replace(
        _PLAIN,
        modules=("self_attn.q_k_v_proj", _O, *_GATE, *_GATED),
        tensors={"self_attn.q_k_v_proj": _EITHER},
    ),
    "plamo": replace(
        _PLAIN, layers=_PLAMO.layers, rows={_Q: queries_by_group}, columns={_O: queries_by_group}
    ),
    "plamo2": _PLAMO,
    "plamo3": _PLAMO,
    "talkie": ModuleLayout(
        layers="model.blocks",
        modules=tuple(name for name in _TALKIE if not name.startswith("model")),
        outer=("model.embed", "lm_head"),
        factors={"attn.attn_query": negated_q, "attn.attn_key": negated_k},
        tensors=_TALKIE,
    ),
    "rwkv6": ModuleLayout(
        layers="rwkv.blocks",
        modules=(
            *(f"attention.{x}" for x in _RWKV_TIME),
            *(f"feed_forward.{x}" for x in ("key", "value", "receptance")),
        ),
        outer=("rwkv.embeddings", "head"),
        factors={"attention.output": halves_by_layer, "feed_forward.value": halves_by_layer},
    ),
    "rwkv6qwen2": replace(_PLAIN, modules=(*_PLAIN.modules, "self_attn.gate")),
    "rwkv7": ModuleLayout(
        modules=tuple(_RWKV7), outer=("model.embeddings", "lm_head"), tensors=_RWKV7
    ),
    "arwkv7": ModuleLayout(modules=(*_TIME_MIXER, *_GATED), tensors=_TIME_MIXER),
}
LAYOUTS: Mapping[str, ModuleLayout] = {**_OF_TRANSFORMERS, **OF_AUTHORS}

# ChatGLM's own class, which the converter reads beside transformers' Glm.
_CHATGLM = ModuleLayout(
    layers="transformer.encoder.layers",
    modules=_BLOOM.modules,
    outer=("transformer.embedding.word_embeddings", "transformer.output_layer"),
    tensors={
        "self_attention.query_key_value": _split("attn_qkv"),
        "self_attention.dense": _split("attn_output"),
        "mlp.dense_h_to_4h": _split("ffn_up"),
        "mlp.dense_4h_to_h": _split("ffn_down"),
        "transformer.embedding.word_embeddings": _split("token_embd"),
        "transformer.output_layer": _split("output"),
    },
)
# Architecture → why no update of its modules can be one of its file's tensors.
NO_LAYOUT = {
    "falcon-h1": "its converter multiplies every matrix by numbers that the file does not have"
}
# Words in the names of modules for pictures and sound, which a text does not pass.
TOWERS = {
    *("vision_tower", "vision_model", "vision_encoder", "visual", "embed_vision"),
    *("vision_projection", "vision_adapter", "multi_modal_projector", "projector"),
    *("audio_tower", "audio_encoder", "embed_audio"),
}


def layout_of(architecture: str, weights: Container[str]) -> ModuleLayout | None:
    """The layout of a file with these tensors; None if none is known."""
    if architecture == "chatglm" and "blk.0.attn_qkv.weight" in weights:
        return _CHATGLM
    return LAYOUTS.get(architecture)
