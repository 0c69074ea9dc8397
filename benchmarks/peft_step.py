"""The same LoRA training step in PyTorch with PEFT, on the CPU, at the shape of a Qwen3 model.

usage: peft_step.py [--dtype f32|bf16] [--tokens 512] [--batch 1] [--rank 8] [--layers N]
                    [--size 0.6B|1.7B|8B|30B-A3B] [--steps 3] [--device cpu|cuda] [--compile]
                    [--in-turns]

Needs torch, transformers and peft; weights are random. Prints a JSON line like step.py's.
"""

from __future__ import annotations

import argparse
import json

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from machine import about, median_seconds, peak_rss_gb
from sizes import HEAD, MODULES, N_VOCAB, SIZES


def config_of(size: str, n_layer: int | None) -> Qwen3Config | Qwen3MoeConfig:
    shape = SIZES[size]
    given = {
        "vocab_size": N_VOCAB,
        "hidden_size": shape.n_embd,
        "num_hidden_layers": n_layer or shape.n_layer,
        "num_attention_heads": shape.n_head,
        "num_key_value_heads": shape.n_head_kv,
        "head_dim": HEAD,
        "tie_word_embeddings": shape.tied,
        "use_cache": False,
    }
    if shape.n_expert:
        experts = {"num_experts": shape.n_expert, "num_experts_per_tok": shape.n_used}
        return Qwen3MoeConfig(moe_intermediate_size=shape.n_ff, **experts, **given)
    return Qwen3Config(intermediate_size=shape.n_ff, **given)


def base_of(size: str, n_layer: int | None, dtype: torch.dtype, **how: str) -> torch.nn.Module:
    """A model of this size; how: what transformers is to compute it with."""
    torch.set_default_dtype(dtype)
    return AutoModelForCausalLM.from_config(config_of(size, n_layer), **how).to(dtype)


def with_adapter(
    base: torch.nn.Module, size: str, rank: int, on_experts: bool = False
) -> torch.nn.Module:
    """Adapters on all linear modules, a mixture's on attention, and its experts if asked for."""
    modules = MODULES[:4] if SIZES[size].n_expert else MODULES
    further = [f"experts.{name}" for name in ("gate_up_proj", "down_proj")] if on_experts else None
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=modules, target_parameters=further
    )
    return get_peft_model(base, config)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--size", choices=list(SIZES), default="0.6B")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="by torch.compile")
    parser.add_argument("--in-turns", action="store_true", help="wait for a line before a step")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    with torch.device(options.device):
        base = base_of(options.size, options.layers, dtype)
        model = with_adapter(base, options.size, options.rank).train()
    forward = torch.compile(model, dynamic=False) if options.compile else model
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step() -> None:
        ids = torch.randint(0, 151936, (options.batch, options.tokens), device=options.device)
        forward(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        if options.device != "cpu":
            torch.cuda.synchronize()

    seconds = median_seconds(step, options.steps, options.in_turns)
    result = {
        "benchmark": f"peft {options.dtype}{' compiled' if options.compile else ''}",
        "model": f"Qwen3-{options.size} shape",
        "batch": options.batch,
        "tokens": options.tokens,
        "rank": options.rank,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(options.batch * options.tokens / seconds, 2),
        "peak_rss_gb": round(peak_rss_gb(), 2),
        "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        **about("torch", "transformers", "peft"),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
