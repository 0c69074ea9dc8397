"""One LoRA training step of pyggml: tokens per second, peak memory, time by op.

usage: step.py MODEL.gguf [--tokens 512] [--rank 8] [--steps 5]

Rank-r adapters on all linear modules, random token ids, one sequence a step. Prints a JSON line;
the time is the median of the steps after the first, which may compile.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from statistics import median
from time import perf_counter

import numpy as np

import pyggml
from pyggml.lora import LoraConfig, Parameters, TrainConfig, attach
from pyggml.lora.data import Batch
from pyggml.lora.optim import AdamW
from pyggml.lora.passes import Passes

from machine import about, peak_rss_gb


def random_batch(n_tokens: int, n_vocab: int) -> Batch:
    """One causal sequence of random tokens, every position trained."""
    ids = np.random.default_rng(0).integers(0, n_vocab, n_tokens + 1).astype(np.int32)
    positions = np.arange(n_tokens, dtype=np.int32)
    span = np.stack([np.zeros_like(positions), positions + 1], axis=1)
    weights = np.full(n_tokens, 1 / n_tokens, np.float32)
    return Batch(ids[:-1], positions, span, ids[1:], weights)


def step(passes: Passes, optimiser: AdamW, parameters: Parameters, batch: Batch, n: int) -> float:
    """Seconds of one whole step: gradients, clipping, update."""
    began = perf_counter()
    parameters.gradient[:] = 0
    passes.train(batch)
    optimiser.clip()
    optimiser.step(1e-4, n)
    return perf_counter() - began


def time_by_op(passes: Passes) -> dict[str, float]:
    """Seconds of every op in one more pass, the largest first."""
    program = passes.programs[0]
    seconds: Counter[str] = Counter()
    for node, (kernel, arguments) in zip(program.nodes, program.calls, strict=True):
        began = perf_counter()
        kernel(*arguments)
        weight = node.src[0].dtype.name if "mat" in node.op.name or "prod" in node.op.name else ""
        seconds[f"{node.op.name} {weight}".strip()] += perf_counter() - began
    return {name: round(s, 4) for name, s in seconds.most_common(12)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()

    began = perf_counter()
    model = pyggml.load(options.model)
    adapter = attach(model, LoraConfig(rank=options.rank, alpha=2.0 * options.rank))
    parameters = adapter.parameters
    passes = Passes(model, parameters, options.tokens, fused=True)
    optimiser = AdamW(parameters, TrainConfig(ctx=options.tokens))
    batch = random_batch(options.tokens, model.config.n_vocab)
    step(passes, optimiser, parameters, batch, 1)
    first = perf_counter() - began
    times = [step(passes, optimiser, parameters, batch, 2 + i) for i in range(options.steps)]
    result = {
        "benchmark": "step",
        "model": options.model.rsplit("/", 1)[-1],
        "tokens": options.tokens,
        "rank": options.rank,
        "seconds": round(median(times), 3),
        "tokens_per_second": round(options.tokens / median(times), 2),
        "peak_rss_gb": round(peak_rss_gb(), 2),
        "planned_gb": round(passes.n_bytes / 1e9, 2),
        "seconds_to_first_step": round(first, 1),
        "by_op": time_by_op(passes),
        **about("pyggml", "numba", "numpy"),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
