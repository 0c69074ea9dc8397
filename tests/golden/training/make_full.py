"""Train all tensors of small models with PyTorch; write the windows and every loss to full.npz.

    python make_full.py FIXTURES     in an environment with torch, transformers, accelerate, gguf,
                                     bitsandbytes

FIXTURES   folder of qwen2-F16.gguf, qwen2-golden.npz and their neighbours. transformers reads the
           files itself, but not all of their keys: UNREAD has these. That it reads the rest is
           checked by the logits of the golden files
settings   JSON: optimiser → settings of `pyggml.lora.TrainConfig`
ids        (n_steps · batch, ctx + 1) int16, in the order of training
ARCHITECTURE/OPTIMISER   (n_steps,) float64 losses, each before its update

Everything is float32 on the CPU. The learning rate is that of `pyggml.lora.schedule`.
"""

from __future__ import annotations

import json
import sys
from math import cos, pi
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bitsandbytes.optim import AdamW8bit
from torch.nn.utils.parametrize import register_parametrization
from transformers import AutoModelForCausalLM

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 128}
UNREAD: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "phi3": {},
    "mistral": {},
    "lfm2": {},
    "qwen3": {"head_dim": 64},
    "qwen3moe": {"moe_intermediate_size": 256},
    "gemma2": {"query_pre_attn_scalar": 64},
    "gemma3": {"query_pre_attn_scalar": 64},
    "gpt2": {"n_positions": 512},
    "llama": {"rope_parameters": LLAMA3},
}
IN_8_BITS = ("qwen3", "phi3", "llama", "qwen2")
N_STEPS, BATCH, CTX, N_WORDS = 100, 2, 32, 61
COMMON = {"max_steps": N_STEPS, "batch": BATCH, "warmup_steps": 10, "clip": 0.5}
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": COMMON | {"optimiser": "adamw", "lr": 5e-4, "weight_decay": 0.1},
    # At 5e-4 bitsandbytes' own losses move by 2e-4 where a last bit of the weights does.
    "adamw8bit": COMMON | {"optimiser": "adamw8bit", "lr": 1e-4, "weight_decay": 0.1},
    "sgd": COMMON | {"optimiser": "sgd", "lr": 0.5, "weight_decay": 1e-3},
}


def windows() -> np.ndarray:
    """Tokens each of which mostly follows from the one before."""
    rng = np.random.default_rng(11)
    ids = np.empty((N_STEPS * BATCH, CTX + 1), np.int16)
    ids[:, 0] = rng.integers(N_WORDS, size=len(ids))
    for t in range(CTX):
        noise = rng.integers(N_WORDS, size=len(ids))
        follows = (5 * ids[:, t] + 3) % N_WORDS
        ids[:, t + 1] = np.where(rng.random(len(ids)) < 0.1, noise, follows)
    return ids


def optimiser_of(parameters: list[torch.nn.Parameter], settings: dict[str, Any]) -> Any:
    kinds = {"adamw": torch.optim.AdamW, "adamw8bit": AdamW8bit, "sgd": torch.optim.SGD}
    return kinds[settings["optimiser"]](parameters, lr=0.0, weight_decay=settings["weight_decay"])


class LessOne(torch.nn.Module):
    """The weight of a norm of Gemma, to which the file adds 1: decay draws the sum to 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - 1

    def right_inverse(self, w: torch.Tensor) -> torch.Tensor:
        return w + 1


def twin_of(folder: str, architecture: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=f"{architecture}-F16.gguf",
        dtype=torch.float32,
        attn_implementation="eager",
        **UNREAD[architecture],
    ).eval()
    with np.load(f"{folder}/{architecture}-golden.npz") as golden, torch.no_grad():
        tokens, wanted = golden["tokens"].astype(np.int64), golden["f32_hf"]
        logits = model(input_ids=torch.from_numpy(tokens[None])).logits[0].numpy()
    assert ((logits - wanted) ** 2).sum() < 1e-11 * (wanted**2).sum(), architecture
    if architecture.startswith("gemma"):
        for part in [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]:
            register_parametrization(part, "weight", LessOne())
    return model


def train(folder: str, architecture: str, ids: np.ndarray, settings: dict[str, Any]) -> np.ndarray:
    model = twin_of(folder, architecture)
    model.get_input_embeddings().padding_idx = None  # whose row would have no gradient
    parameters, losses = list(model.parameters()), list[float]()
    optimiser, n_warmup = optimiser_of(parameters, settings), settings["warmup_steps"]
    for n in range(N_STEPS):
        rate = (n + 1) / n_warmup
        if n >= n_warmup:
            rate = (1 + cos(pi * (n - n_warmup) / (N_STEPS - n_warmup))) / 2
        batch = torch.from_numpy(ids[n * BATCH : (n + 1) * BATCH].astype(np.int64))
        optimiser.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, settings["clip"])
        optimiser.param_groups[0]["lr"] = settings["lr"] * rate
        optimiser.step()
        losses.append(loss.item())
    return np.array(losses)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    ids = windows()
    arrays = {"settings": np.array(json.dumps(SETTINGS)), "ids": ids}
    for architecture in UNREAD:
        for name in [n for n in SETTINGS if n != "adamw8bit" or architecture in IN_8_BITS]:
            settings = SETTINGS[name]
            losses = arrays[f"{architecture}/{name}"] = train(folder, architecture, ids, settings)
            print(architecture, name, losses[:2], "…", losses[-2:])
    np.savez_compressed(Path(__file__).with_name("full.npz"), **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
