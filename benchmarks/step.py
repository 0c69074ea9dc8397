"""One LoRA training step of pyggml: tokens per second, peak memory, time by op.

usage: step.py MODEL.gguf [--tokens 512] [--rank 8] [--steps 5] [--compute auto|int8|bf16|f32]
               [--grad-checkpointing] [--in-turns]

Rank-r adapters on all linear modules, random token ids, one sequence a step. Prints a JSON line;
the time is the median of the steps after the first, which may compile. The share of the peak counts
4 FLOP for each matrix weight and token, against the rate of the microkernel for floats (gemm.py),
bfloat16's on a CPU that has it, though integers are multiplied faster.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from itertools import count
from math import prod
from statistics import median
from time import perf_counter

from batches import random_batch
from gemm import limit, limit_flop, seconds

import pyggml
from pyggml.backward import Keep
from pyggml.kernels.gemm import FLOATS
from pyggml.kernels.kernel import Compute
from pyggml.look.limits import matrix_uses
from pyggml.lora import LoraConfig, Parameters, TrainConfig, attach
from pyggml.lora.data import WindowBatch
from pyggml.lora.optim import FlatAdamW
from pyggml.lora.trainer.passes import Passes
from pyggml.model import COMPUTE_TYPES, Model

from machine import about, median_seconds, peak_rss_gb


def step(
    passes: Passes, optimiser: FlatAdamW, parameters: Parameters, batch: WindowBatch, n: int
) -> None:
    """One whole step: gradients, clipping, update."""
    parameters.gradient[:] = 0
    passes.train(batch)
    optimiser.clip()
    optimiser.step(1e-4, n)


def time_by_op(passes: Passes) -> dict[str, float]:
    """Seconds of every op in a pass, node by node, the largest first: medians of three more."""
    walks = [list(_times(passes)) for _ in range(3)]
    taken: Counter[str] = Counter()
    for nodes in zip(*walks, strict=True):
        taken[nodes[0][0]] += median(seconds for _, seconds in nodes)
    return {name: round(s, 4) for name, s in taken.most_common(12)}


def _times(passes: Passes) -> Iterator[tuple[str, float]]:
    began = perf_counter()
    for node, _ in passes.programs[0].walk():
        weight = node.src[-2].dtype.name if "mat" in node.op.name or "prod" in node.op.name else ""
        yield f"{node.op.name} {weight}".strip(), perf_counter() - began
        began = perf_counter()


def matrix_weights(model: Model) -> float:
    """Weights that a token is multiplied with: of experts those that it is sent to; a tied
    embedding serves as the output matrix."""
    return sum(part * prod(w.shape) for w, part in matrix_uses(model))


def peak_flops(compute: Compute) -> float:
    """The rate on all threads of the microkernel for floats, the median of five."""
    compute = compute if compute == "f32" else FLOATS
    return limit_flop(compute) / median(seconds(limit(compute)) for _ in range(5))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compute", choices=COMPUTE_TYPES, default="auto")
    parser.add_argument("--grad-checkpointing", action="store_true")
    parser.add_argument("--in-turns", action="store_true", help="wait for a line before a step")
    return parser.parse_args()


def main() -> None:
    options, began = read_options(), perf_counter()
    model = pyggml.load(options.model, compute=options.compute)
    adapter = attach(model, LoraConfig(rank=options.rank, alpha=2.0 * options.rank))
    parameters, numbers = adapter.parameters, count(1)
    keep = Keep.LAYERS if options.grad_checkpointing else Keep.COSTLY
    passes = Passes(adapter.model, parameters, options.tokens, keep=keep)
    optimiser = FlatAdamW(parameters, TrainConfig())
    batch = random_batch(1, options.tokens, model.config.n_vocab)
    first = 0.0

    def one() -> None:
        nonlocal first
        step(passes, optimiser, parameters, batch, next(numbers))
        first = first or perf_counter() - began

    taken = median_seconds(one, options.steps, options.in_turns)
    rss, speed = peak_rss_gb(), options.tokens / taken
    peak = peak_flops(model.backend.compute)
    result = {
        "benchmark": "step",
        "model": options.model.rsplit("/", 1)[-1],
        "compute": model.backend.compute,
        "tokens": options.tokens,
        "rank": options.rank,
        "grad_checkpointing": options.grad_checkpointing,
        "seconds": round(taken, 3),
        "tokens_per_second": round(speed, 2),
        "peak_rss_gb": round(rss, 2),
        "planned_gb": round(passes.n_bytes / 1e9, 2),
        "seconds_to_first_step": round(first, 1),
        "peak_gflops": round(peak / 1e9, 1),
        "share_of_peak": round(4 * matrix_weights(model) * speed / peak, 3),
        "by_op": time_by_op(passes),
        **about("pyggml", "numba", "numpy"),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
