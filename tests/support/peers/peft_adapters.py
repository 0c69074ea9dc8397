"""Adapters that PEFT makes of the peers, with random numbers."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import numpy as np

from peers import PEERS
from peers.peer import N_TOKENS, N_VOCAB, torch_model

# PEFT refuses these: Mamba's fused kernels go past its modules.
NOT_IN_PEFT = ("mamba", "falcon-mamba", "mamba2")
# Their own classes, whose modules are fused, are not part of transformers.
NOT_IN_TRANSFORMERS = ("internlm2", "baichuan", "exaone")
_LEFT_OUT = ("shared_expert_gate", "router", "wpe")


def tokens() -> np.ndarray:
    return np.random.default_rng(7).integers(0, N_VOCAB, N_TOKENS).astype(np.int32)


def adapted(name: str, short: Any = None) -> Any:
    """A peer with updates of all its modules and experts, alpha 5, by rsLoRA; ranks and alphas
    differ. short: a type of 16 bits that the numbers are exact in."""
    import torch
    from peft import LoraConfig, get_peft_model

    base = torch_model(PEERS[name])
    experts = [n for n, p in base.named_parameters() if p.ndim == 3 and "experts" in n]
    config = LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=_modules(base),
        target_parameters=experts or None,
        use_rslora=True,
        # Of patterns that overlap PEFT forgets the order, and it adds some for experts.
        rank_pattern={} if experts else {r"layers\.1\..*": 2},
        alpha_pattern={".*(o_proj|dense|c_proj)": 7.5},
    )
    model = get_peft_model(base, config).eval()
    for key, p in model.named_parameters():
        if "lora_" in key:
            rng = np.random.default_rng(crc32(key.encode()))
            p.data = torch.from_numpy(rng.normal(0, 0.15, tuple(p.shape)).astype(np.float32))
            p.data = p.data.to(short or p.dtype).float()
    return model


def _modules(base: Any) -> list[str]:
    import torch

    tied = base.config.tie_word_embeddings
    kinds = (torch.nn.Linear,) if tied else (torch.nn.Linear, torch.nn.Embedding)
    return [
        n
        for n, m in base.named_modules()
        if (isinstance(m, kinds) or type(m).__name__ == "Conv1D")
        and not n.endswith((*_LEFT_OUT, "lm_head" if tied else "wpe"))
    ]


def logits(model: Any, ids: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        found = model(input_ids=torch.from_numpy(ids)[None].long())
    return found.logits[0].numpy()
