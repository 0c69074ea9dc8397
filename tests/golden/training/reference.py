"""The model that PyTorch and PEFT train, tests/golden/models/qwen3-F16.gguf, and the adapter that
it starts with, qwen3-lora.gguf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from peft import LoraConfig
from transformers import Qwen3Config, Qwen3ForCausalLM

MODELS = Path(__file__).parents[1] / "models"
EOS, N_VOCAB = 2, 512
# module in the GGUF file -> in transformers
MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {
        t.name: torch.from_numpy(t.data.astype(np.float32)) for t in gguf.GGUFReader(path).tensors
    }


def named(name: str) -> str:
    """A tensor's name in transformers."""
    outer = {"token_embd": "embed_tokens", "output_norm": "norm"}
    first, *rest = name.removesuffix(".weight").split(".")
    inner = outer[first] if not rest else f"layers.{rest[0]}.{MODULES[rest[1]]}"
    return f"model.{inner}.weight"


def base_model() -> Qwen3ForCausalLM:
    path = MODELS / "qwen3-F16.gguf"
    fields = gguf.GGUFReader(path).fields
    keys = {
        "num_hidden_layers": "block_count",
        "max_position_embeddings": "context_length",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "rope_theta": "rope.freq_base",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "head_dim": "attention.key_length",
    }
    found = {name: fields[f"qwen3.{key}"].contents() for name, key in keys.items()}
    found["rope_parameters"] = {"rope_type": "default", "rope_theta": found.pop("rope_theta")}
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=N_VOCAB, tie_word_embeddings=True, eos_token_id=EOS, **found)
    ).float()
    weights = {named(name): t for name, t in tensors(path).items()}
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown and missing in ([], ["lm_head.weight"]), (missing, unknown)
    return model


def lora_config() -> LoraConfig:
    linear = [m.rsplit(".", 1)[1] for m in MODULES.values() if m.endswith("proj")]
    return LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=linear)


def start(model: Any) -> None:
    """Give PEFT's A and B the adapter file's numbers."""
    found, at = dict(model.named_parameters()), tensors(MODELS / "qwen3-lora.gguf")
    for name, t in at.items():
        base, side = name.rsplit(".lora_", 1)
        inner = named(base).removesuffix(".weight")
        found[f"base_model.model.{inner}.lora_{side.upper()}.default.weight"].data.copy_(t)
    trained = sum(p.requires_grad for p in model.parameters())
    assert trained == len(at), f"{trained} trained tensors, {len(at)} in the file"
