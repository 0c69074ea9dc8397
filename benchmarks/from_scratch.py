"""Training steps of small models from scratch: pyggml against PyTorch, compiled, on the same cores.

usage: from_scratch.py --torch-python PATH/TO/python [--shape characters|10M] [--rounds 20]
                       [--threads 2]

characters is nanoGPT's model for CPUs (4 layers of width 128, 12 × 64 tokens, 65 of a vocabulary),
10M has 5 layers of width 384, 2,048 tokens and 8 × 256. All tensors train by AdamW, random tokens
are read. PATH has torch and transformers. Each side is a process of its own, float32 and bfloat16
are two of PyTorch's; in turn they take five steps, as a run does one after the other, and medians
of their means are compared. Prints each process' JSON line and a table.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from machine import about, median_seconds, peak_rss_gb
from turns import Runner


class Shape(NamedTuple):
    """A llama, and the sequences of a step."""

    n_layer: int
    width: int
    n_ff: int
    n_head: int
    n_vocab: int
    batch: int
    n_ctx: int


SHAPES = {
    "characters": Shape(4, 128, 352, 4, 65, 12, 64),
    "10M": Shape(5, 384, 1024, 6, 2048, 8, 256),
}
STEPS = 5  # of a turn: after others' turns a first step finds cold caches and sleeping threads
OURS, FLOAT32, BFLOAT16 = "pyggml", "PyTorch float32", "PyTorch bfloat16"


def step_of_pyggml(s: Shape, threads: int) -> Callable[[], None]:
    """A step of a fresh model."""
    from batches import random_batch

    import pyggml
    from pyggml.fresh import Fresh, hyperparameters, write
    from pyggml.lora import TrainConfig, train_tensors
    from pyggml.lora.optim import FlatAdamW
    from pyggml.lora.trainer.passes import Passes

    sizes = {"block_count": s.n_layer, "embedding_length": s.width, "feed_forward_length": s.n_ff}
    heads = {"attention.head_count": s.n_head, "attention.head_count_kv": s.n_head}
    keys = {f"llama.{name}": n for name, n in (sizes | heads).items()}
    metadata = hyperparameters("llama", 10**6, s.n_vocab, s.n_ctx, keys=keys)
    no_text = {"tokenizer.ggml.model": "no_vocab", "llama.vocab_size": s.n_vocab}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "fresh.gguf")
        write(path, Fresh(metadata, s.n_vocab, no_text))
        model = pyggml.load(path)
    pyggml.threads.set(threads)
    trained = train_tensors(model, ["*"])
    p, n_tokens = trained.parameters, s.batch * s.n_ctx
    passes = Passes(trained.model, p, n_tokens, s.n_ctx)
    optimiser, batch, done = (
        FlatAdamW(p, TrainConfig()),
        random_batch(s.batch, s.n_ctx, s.n_vocab),
        [0],
    )

    def step() -> None:
        done[0] += 1
        p.gradient[:] = 0
        passes.train(batch)
        optimiser.clip()
        optimiser.step(1e-3, done[0])

    return step


def step_of_torch(s: Shape, threads: int, bfloat16: bool) -> Callable[[], None]:
    """A step of transformers' llama of the same shape, by torch.compile."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(threads)
    config = LlamaConfig(
        vocab_size=s.n_vocab,
        hidden_size=s.width,
        intermediate_size=s.n_ff,
        num_hidden_layers=s.n_layer,
        num_attention_heads=s.n_head,
        max_position_embeddings=s.n_ctx,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16 if bfloat16 else torch.float32).train()
    forward = torch.compile(model, dynamic=False)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(0, s.n_vocab, (s.batch, s.n_ctx))

    def step() -> None:
        forward(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()

    return step


def measure(side: str, shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """The median step of one side."""
    s = SHAPES[shape]
    if side == OURS:
        step = step_of_pyggml(s, options.threads)
    else:
        step = step_of_torch(s, options.threads, side == BFLOAT16)
    step()

    def turn() -> None:
        for _ in range(STEPS):
            step()

    seconds = median_seconds(turn, options.rounds, options.in_turns) / STEPS
    return {
        "side": side,
        "shape": shape,
        "seconds": round(seconds, 5),
        "tokens_per_second": round(s.batch * s.n_ctx / seconds),
        "peak_rss_gb": round(peak_rss_gb(), 2),
        **about("pyggml", "torch"),
    }


def race(options: argparse.Namespace) -> None:
    """All sides in turn."""
    common = ["--shape", options.shape, "--rounds", str(options.rounds)]
    common += ["--threads", str(options.threads)]
    pythons = {OURS: sys.executable, FLOAT32: options.torch_python, BFLOAT16: options.torch_python}
    runners = [Runner(p, Path(__file__), "--side", side, *common) for side, p in pythons.items()]
    for _ in range(options.rounds):
        lines = [runner.turn() for runner in runners]
    results = [json.loads(line) for line in lines]
    print("".join(lines))
    for result in results:
        ratio = result["seconds"] / results[0]["seconds"]
        print(f"{result['side']:<18}{result['tokens_per_second']:>9,} tokens/s{ratio:>7.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-python")
    parser.add_argument("--shape", choices=SHAPES, default="characters")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--side", choices=[OURS, FLOAT32, BFLOAT16], help="measure this one alone")
    parser.add_argument("--in-turns", action="store_true", help="wait for a line before a step")
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(options.side, options.shape, options)))
    elif options.torch_python:
        race(options)
    else:
        parser.error("wanted --torch-python, an interpreter with torch and transformers")


if __name__ == "__main__":
    main()
