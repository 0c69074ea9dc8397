"""Writes peft.npz: a tiny model with adapters of several kinds, as PEFT computes them.

    python make.py          (wants torch, transformers and peft)

weights/NAME        float16, by names in a GGUF file of the architecture qwen3
tokens              (n,) int32
KIND/logits, /loss  with the adapter of that kind, whose tensors are all random
KIND/NAME.lora_a, .lora_b, .lora_magnitude; KIND/grad/… likewise
pissa/start/NAME.lora_a, .lora_b        what PEFT subtracts from the weight
plus/losses         of five steps of AdamW with LoRA+, from the adapter of kind rslora
plus/NAME.lora_b    after them
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from transformers import Qwen3Config, Qwen3ForCausalLM

N_VOCAB, N_TOKENS = 48, 24
MATRICES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
MATRICES |= {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
NAMES = {f"{short}_proj": name for short, name in MATRICES.items()}
NAMES |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
NAMES |= {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
USUAL = {"r": 3, "lora_alpha": 7.0, "target_modules": list(NAMES)[:7]}
PATTERNS = {
    "rank_pattern": {"up_proj": 5, "layers.1.self_attn.q_proj": 2},
    "alpha_pattern": {"down_proj": 4.5},
}
KINDS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True, **PATTERNS},
    "patterns": PATTERNS,
    "dora": {"use_dora": True, "use_rslora": True},
    "pissa": {"init_lora_weights": "pissa"},
}
PARTS = {"lora_A": "lora_a", "lora_B": "lora_b", "lora_magnitude_vector": "lora_magnitude"}


def base() -> Qwen3ForCausalLM:
    """The same random weights every time, exact in float16."""
    config = Qwen3Config(
        vocab_size=N_VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(config).eval().float()
    rng = np.random.default_rng(0)
    for p in model.parameters():
        x = rng.standard_normal(p.shape)
        x = 1 + 0.2 * x if p.ndim == 1 else 1.2 * x / p.shape[1] ** 0.5
        p.data = torch.from_numpy(x.astype(np.float16).astype(np.float32))
    return model


def gguf_name(name: str) -> str:
    """model.layers.0.mlp.up_proj.weight -> blk.0.ffn_up.weight."""
    stem = name.removesuffix(".weight")
    if stem in OUTER:
        return f"{OUTER[stem]}.weight"
    _, _, layer, *_, module = stem.split(".")
    return f"blk.{layer}.{NAMES[module]}.weight"


def adapter_names(model: Any) -> dict[str, torch.nn.Parameter]:
    """blk.0.ffn_up.weight.lora_a -> PEFT's parameter."""
    found = {}
    for name, p in model.named_parameters():
        for theirs, ours in PARTS.items():
            if f".{theirs}" in name:
                stem = name.removeprefix("base_model.model.").split(f".{theirs}")[0]
                found[f"{gguf_name(stem)}.{ours}"] = p
    return found


def loss_of(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(input_ids=ids).logits[0]
    return logits, torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:])


def golden() -> dict[str, np.ndarray]:
    found = {f"weights/{gguf_name(n)}": p.detach().numpy() for n, p in base().named_parameters()}
    found = {name: a.astype(np.float16) for name, a in found.items()}
    tokens = np.random.default_rng(7).integers(0, N_VOCAB, N_TOKENS).astype(np.int32)
    found["tokens"] = tokens
    ids = torch.from_numpy(tokens)[None].long()
    for kind, settings in KINDS.items():
        torch.manual_seed(0)
        model = get_peft_model(base(), LoraConfig(**USUAL, **settings)).eval()
        parameters = adapter_names(model)
        if kind == "pissa":
            found |= {f"pissa/start/{n}": p.detach().numpy().copy() for n, p in parameters.items()}
        rng = np.random.default_rng(1)
        for p in parameters.values():
            p.data += torch.from_numpy(rng.normal(0, 0.1, p.shape).astype(np.float32))
        logits, loss = loss_of(model, ids)
        loss.backward()
        found |= {
            f"{kind}/logits": logits.detach().numpy(),
            f"{kind}/loss": np.float32(loss.item()),
        }
        found |= {f"{kind}/{n}": p.detach().numpy().copy() for n, p in parameters.items()}
        found |= {f"{kind}/grad/{n}": p.grad.numpy().copy() for n, p in parameters.items()}
        if kind == "rslora":
            found |= plus(model, parameters, ids)
    return found


def plus(model: Any, parameters: dict[str, Any], ids: torch.Tensor) -> dict[str, np.ndarray]:
    """Five steps with LoRA+."""
    optimiser = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=2e-3, loraplus_lr_ratio=8.0, loraplus_weight_decay=0.1
    )
    losses = []
    for _ in range(5):
        optimiser.zero_grad()
        _, loss = loss_of(model, ids)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    found = {f"plus/{n}": p.detach().numpy().copy() for n, p in parameters.items() if n[-1] == "b"}
    return found | {"plus/losses": np.array(losses, np.float32)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    np.savez_compressed(Path(__file__).with_name("peft.npz"), **golden())
