"""A LoRA step of PEFT or Unsloth on a card, in the forms in which each is fast.

usage: card_step.py [--liger] [--compile] [--experts grouped_mm|eager] [--expert-adapters]
                    [--unsloth [--four-bit] [--checkpoint] [--model DIR]]
                    [--size 1.7B] [--layers N] [--sizes 1x512,16x512] [--rank 8] [--steps 10]
                    [--in-turns]

Random weights in bfloat16, fused AdamW, adapters on all linear modules, of a mixture on those of
attention (--expert-adapters: and of experts). PEFT is eager, with Liger's kernels, by
torch.compile, or with another way to multiply experts (transformers' experts_implementation).

Unsloth: with graphs of each layer (UNSLOTH_BLOCK_CUDAGRAPHS, its fastest), weights in bfloat16 or
in 4 bits (NF4), with its checkpointing or without; DIR gets the model and a tokenizer without
meaning. It wants a place of its own on PYTHONPATH, beside its needs, and is imported first.

A JSON line for each size: tokens/s by the median of the steps after three, seconds of the first,
GB at most of tensors and of what the allocator keeps, the loss. --in-turns: wait for a line before
each size's steps, when all sizes have been warmed up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from fcntl import LOCK_EX, flock
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from machine import about
from sizes import MODULES, N_VOCAB, SIZES

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def peft_model(options: argparse.Namespace) -> Any:
    import torch
    from peft_step import base_of, with_adapter

    if options.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3()
    experts = {"experts_implementation": options.experts} if options.experts else {}
    with torch.device("cuda"):
        base = base_of(options.size, options.layers, torch.bfloat16, **experts)
        return with_adapter(base, options.size, options.rank, options.expert_adapters).train()


def write_model(options: argparse.Namespace) -> None:
    """A model in DIR, with a tokenizer of single bytes."""
    import torch
    from peft_step import base_of
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    with torch.device("cuda"):
        base = base_of(options.size, options.layers, torch.bfloat16)
    base.config.update({"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258})
    base.save_pretrained(options.model)
    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=40960, **special)
    fast.save_pretrained(options.model)


def unsloth_model(options: argparse.Namespace) -> Any:
    os.environ |= dict.fromkeys((*OFFLINE, "UNSLOTH_DISABLE_STATISTICS"), "1")
    os.environ.setdefault("UNSLOTH_BLOCK_CUDAGRAPHS", "1")
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", f"unsloth-compiled-{os.getpid()}")
    from unsloth import FastLanguageModel  # before torch and transformers, which it changes

    keeps: dict[str, Any] = {
        "use_gradient_checkpointing": "unsloth" if options.checkpoint else False
    }
    model, _ = FastLanguageModel.from_pretrained(
        str(options.model), max_seq_length=2048, load_in_4bit=options.four_bit,
        local_files_only=True, **keeps,
    )  # fmt: skip
    model = FastLanguageModel.get_peft_model(
        model, r=options.rank, lora_alpha=2 * options.rank, target_modules=MODULES, **keeps
    )
    return FastLanguageModel.for_training(model, **keeps)


def stepper(model: Any, forward: Any, size: tuple[int, int]) -> Callable[[], tuple[float, float]]:
    """A function that takes a step at this size: seconds and loss."""
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    ids = torch.randint(0, N_VOCAB, size, device="cuda")

    def step() -> tuple[float, float]:
        began = perf_counter()
        loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        torch.cuda.synchronize()
        return perf_counter() - began, float(loss.detach())

    return step


def measure(model: Any, options: argparse.Namespace) -> None:
    import torch

    torch.set_float32_matmul_precision("high")
    forward = torch.compile(model, dynamic=False) if options.compile else model
    words = "four_bit checkpoint liger compile experts expert_adapters layers rank"
    fields = {name: value for name in words.split() if (value := getattr(options, name))}
    sizes = [tuple(int(n) for n in size.split("x")) for size in options.sizes.split(",")]
    steps = [stepper(model, forward, size) for size in sizes]
    warm = [[step()[0] for _ in range(3)] for step in steps]
    for size, step, (first, *_) in zip(sizes, steps, warm, strict=True):
        if options.in_turns:
            print("ready", flush=True)
            sys.stdin.readline()
        torch.cuda.reset_peak_memory_stats()
        taken, losses = zip(*(step() for _ in range(options.steps)), strict=True)
        line = {
            "benchmark": "unsloth" if options.unsloth else "peft", "model": options.size,
            "batch": size[0], "ctx": size[1], **fields, "seconds": median(taken),
            "tokens_per_second": round(size[0] * size[1] / median(taken)),
            "seconds_to_first_step": round(first, 1),
            "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
            "kept_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2), "loss": losses[-1],
        }  # fmt: skip
        print(json.dumps(line | about("torch", "transformers", "peft", "unsloth")), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    flags = "unsloth four-bit checkpoint liger compile expert-adapters in-turns write"
    for word in flags.split():
        parser.add_argument(f"--{word}", action="store_true")
    parser.add_argument("--experts", default="", help="transformers' experts_implementation")
    parser.add_argument("--model", type=Path, default=Path("unsloth-model"))
    parser.add_argument("--size", choices=list(SIZES), default="1.7B")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--sizes", default="1x512,16x512")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if options.write:
        write_model(options)
        return
    if options.unsloth:
        with Path(f"{options.model}.lock").open("w") as lock:
            flock(lock, LOCK_EX)  # of several processes the first writes
            if not (options.model / "tokenizer_config.json").exists():
                command = [sys.executable, __file__, *sys.argv[1:], "--write"]
                subprocess.run(command, check=True)  # another one: Unsloth is to be imported first
    measure(unsloth_model(options) if options.unsloth else peft_model(options), options)


if __name__ == "__main__":
    main()
