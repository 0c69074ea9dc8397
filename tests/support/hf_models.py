"""Small models of transformers' classes, and llama.cpp's own conversion of them.

The converter moves the numbers of a matrix to other places and computes none of them, so it
converts gradients too: a checkpoint whose numbers are the gradients becomes a file of them.

    PYTHONPATH=LLAMA_CPP:LLAMA_CPP/gguf-py     for `conversion`, and torch beside it
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from hf_sizes import CLASS_OF, CONFIG_OF, FULL_ROPE, MODELS, N_VOCAB, PICTURES, SIZES

from pyggml.models.architectures import gemma3n

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
