"""Writes folders/NAME: adapters that PEFT saved, of the small models of tests/support/peers, and
PyTorch's logits with them.

    PYTHONPATH=../../support python make_folders.py          (wants torch, transformers and peft)

adapter_config.json, adapter_model.safetensors   as PEFT saves them, but with numbers of 16 bits
logits.npy                                       float32 (n_tokens, n_vocab)
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from peers.peft_adapters import adapted, logits, tokens

HERE = Path(__file__).parent / "folders"
# With rotary pairs moved and a vocabulary; fused and in bfloat16; Conv1D; split, with experts.
NAMES = {"granite": "half", "phi3": "bfloat16", "gpt2": "half", "qwen3next": "half"}


def main() -> None:
    import torch

    for name, kind in NAMES.items():
        folder, model = HERE / name, adapted(name, short=getattr(torch, kind))
        model.save_pretrained(folder)
        (folder / "README.md").unlink()
        path = folder / "adapter_model.safetensors"
        halves = {n: t.to(getattr(torch, kind)) for n, t in load_file(path).items()}
        save_file(halves, path, {"format": "pt"})
        np.save(folder / "logits.npy", logits(model, tokens()))
        sys.stdout.write(f"{name}: {sum(p.stat().st_size for p in folder.iterdir())} bytes\n")


main()
