"""What a GPU does through WebGPU: LoRA steps beside two CPU cores, products. One JSON line a row.

usage: webgpu.py [MODEL.gguf …] [--rows machine,product,step,op,cpu] [--tokens 512] [--rank 8]
                 [--steps 8] [--size 4096] [--cores 0,1] [--compute f16]
                 [--features subgroup,…]

--compute f32 unpacks weights to float32; --features: those to use, of what the device may have.

MODEL is a file that make_model.py writes with --size 0.6B. Rows:

machine   the float32 rate of a product (SIZE³), the most that plain shaders reach here
product   products with packed weights, unpacked each time, at shapes of Qwen3-0.6B; one row of x,
          as in generation, and TOKENS; forward and back
step      a whole step of LoRA on all linear modules: tokens/s, memory, share of the float32 rate
          (4 FLOP for each matrix weight and token), what the CPU computes
op        where the time of one pass goes, by the device's own clock, each node by itself
cpu       the same step by step.py on the two CPU cores CORES, in a process of its own

Without a GPU, software Vulkan will do, at a small size: --size 256 --tokens 32.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import chain, count, islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import numpy as np
import wgpu
from batches import random_batch
from step import matrix_weights

import pyggml
from pyggml.backends.kit.products import Factor
from pyggml.backends.webgpu.ops.products import (
    ShaderOperands,
    ShaderProblem,
    multiply,
    scratch_bytes,
)
from pyggml.backends.webgpu.runtime.device import FEATURES, WebGPUBackend
from pyggml.backends.webgpu.wgsl.shader import BufferRange, Dispatch
from pyggml.graph.dtypes import DTYPES, F32
from pyggml.lora import LoraConfig, TrainConfig, attach
from pyggml.lora.optim import FlatAdamW
from pyggml.lora.ranks import ALONE
from pyggml.lora.trainer.gradient import StepGradient
from pyggml.lora.trainer.passes import Passes
from pyggml.quants import quantize

from machine import about

HERE = Path(__file__).parent
SHAPES = ((1024, 1024), (3072, 1024), (1024, 3072))  # n_out, n_in
REPEATS, ROUNDS = 8, 5
WARM = 0.3  # seconds
_QUERIES = 1024  # passes that are timed at once


class Card:
    """The device that is measured, and the lines about it."""

    def __init__(self, compute: Literal["f32", "f16"], wanted: str) -> None:
        adapter = wgpu.gpu.request_adapter_sync(power_preference="high-performance")
        self.name = f"{adapter.info['device']} through {adapter.info['backend_type']}"
        optional = [name for name in wanted.split(",") if name in adapter.features]
        features = ["timestamp-query", *optional]
        self.backend = WebGPUBackend(adapter, features=features, compute=compute)
        self.how = {"compute": compute, "features": " ".join(optional)}
        self.flops = 0.0

    def seconds(self, groups: Sequence[Sequence[Dispatch]], repeats: int = 1) -> list[float]:
        """Time of each group of dispatches, by the device's own clock."""
        taken: list[float] = []
        for first in range(0, len(groups), _QUERIES):
            taken += self._seconds_of(groups[first : first + _QUERIES], repeats)
        return taken

    def _seconds_of(self, groups: Sequence[Sequence[Dispatch]], repeats: int) -> list[float]:
        device, n = self.backend.device, len(groups)
        marks = device.create_query_set(type="timestamp", count=2 * n)
        usage = wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC
        times = device.create_buffer(size=16 * n, usage=usage)
        encoder = device.create_command_encoder()
        for i, dispatches in enumerate(groups):
            ends = {"beginning_of_pass_write_index": 2 * i, "end_of_pass_write_index": 2 * i + 1}
            working = encoder.begin_compute_pass(timestamp_writes={"query_set": marks, **ends})
            for each in (*dispatches,) * repeats:
                working.set_pipeline(each.pipeline)
                working.set_bind_group(0, each.bindings)
                working.dispatch_workgroups(*each.groups)
            working.end()
        encoder.resolve_query_set(marks, 0, 2 * n, times, 0)
        device.queue.submit([encoder.finish()])
        stamps = np.frombuffer(device.queue.read_buffer(times), np.int64).reshape(n, 2)
        return [float(ns) / 1e9 / repeats for ns in stamps[:, 1] - stamps[:, 0]]

    def say(self, row: str, **fields: Any) -> None:
        rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in fields.items()}
        line = {"benchmark": f"webgpu {row}", "device": self.name, **self.how, **rounded}
        print(json.dumps(line | about("pyggml", "wgpu", "numba", "numpy")), flush=True)


# -- machine and products -----------------------------------------------------------------------


def product_seconds(card: Card, p: ShaderProblem, w: np.ndarray) -> float:
    """A product with random x: its median time, unpacking included."""
    backend, rng = card.backend, np.random.default_rng(1)
    n_scratch = max(scratch_bytes(p, backend.shaders), 64)
    x = rng.standard_normal(p.m * p.k, np.float32)
    sizes = (x.nbytes, w.nbytes, F32.block_bytes * p.m * p.n, n_scratch)
    a, b, c, scratch = (
        BufferRange(backend.alloc(size), 0, size, is_written=True) for size in sizes
    )
    backend.device.queue.write_buffer(a.buffer, 0, x)
    backend.device.queue.write_buffer(b.buffer, 0, w)
    b = b if p.b.dtype is F32 else b.of("u8")
    calls = multiply(p, ShaderOperands(c, a, b, scratch), backend.shaders)
    began = perf_counter()
    while perf_counter() - began < WARM:  # clocks rise under load
        card.seconds([calls] * ROUNDS, REPEATS)
    return median(card.seconds([calls] * ROUNDS, REPEATS))


def machine(card: Card, size: int) -> None:
    p = ShaderProblem(size, size, size, Factor(size, 1), Factor(size, 1))
    w = np.random.default_rng(0).standard_normal(size * size, np.float32)
    card.flops = 2 * size**3 / product_seconds(card, p, w)
    card.say("machine", size=size, f32_tflops=card.flops / 1e12)


def products(card: Card, tokens: int) -> None:
    rng = np.random.default_rng(0)
    for kind in ("Q8_0", "Q4_K", "Q6_K"):
        for n_out, n_in in SHAPES:
            some = quantize(rng.standard_normal((64, n_in), np.float32), kind)
            w = np.tile(some.reshape(64, -1).view(np.uint8), (n_out // 64, 1))
            for rows, back in ((1, False), (tokens, False), (tokens, True)):
                n, k = (n_in, n_out) if back else (n_out, n_in)
                step = Factor(1, n_in, dtype=DTYPES[kind])
                of_w = step if back else Factor(n_in, 1, dtype=DTYPES[kind])
                taken = product_seconds(card, ShaderProblem(rows, n, k, Factor(k, 1), of_w), w)
                card.say(
                    "product", type=kind, rows=rows, n_out=n_out, n_in=n_in, back=back,
                    microseconds=taken * 1e6, tflops=2 * rows * n * k / taken / 1e12,
                    share_of_peak=share(card, 2 * rows * n * k / taken),
                    weights_gb_per_second=w.nbytes / taken / 1e9,
                )  # fmt: skip


def share(card: Card, flops: float) -> float:
    return flops / card.flops if card.flops else 0.0


# -- training steps -----------------------------------------------------------------------------


def steps(card: Card, file: str, options: Any) -> float:
    """Seconds of a step."""
    n, numbers = options.tokens, count(1)
    model = pyggml.load(file, backends=[card.backend])
    adapter = attach(model, LoraConfig(rank=options.rank, alpha=2.0 * options.rank))
    parameters = adapter.parameters
    passes = Passes(adapter.model, parameters, n)
    batch, taken = random_batch(1, n, model.config.n_vocab), []
    with model.devices.holding(*chain(*parameters.buffers.values())):
        optimiser = FlatAdamW(parameters, TrainConfig(), model.devices)
        gradient = StepGradient(parameters, model.devices, ALONE)
        for i in islice(numbers, options.steps + 2):
            began = perf_counter()
            gradient.begin()
            passes.train(batch)
            optimiser.clip()
            optimiser.step(1e-4, i)
            taken.append(perf_counter() - began)
        if "op" in options.rows:
            by_op = time_by_op(card, passes)
            busy = sum(us for us, _ in by_op.values()) / 1e6
            card.say("op", model=Path(file).name, tokens=n, seconds=busy, microseconds=by_op)
    seconds = median(taken[2:])
    left = {f"{device}: {op}": why for (device, op), why in passes.training.fallbacks.items()}
    weights = sum(w.n_bytes for w in model.parts.weights.values())
    card.say(
        "step", model=Path(file).name, tokens=n, rank=options.rank, seconds=seconds,
        tokens_per_second=n / seconds, planned_gb=passes.n_bytes / 1e9, weights_gb=weights / 1e9,
        share_of_peak=share(card, 4 * matrix_weights(model) * n / seconds),
        seconds_to_first_step=taken[0], left_to_cpu=left,
    )  # fmt: skip
    return seconds


def time_by_op(card: Card, passes: Passes) -> dict[str, list[int]]:
    """Op and type of its weight -> [microseconds in a pass, nodes], the longest first."""
    kernels = passes.programs[0].kernels[card.backend]
    calls = [call.arguments[0] for call in kernels.values()]
    taken: Counter[str] = Counter()
    nodes: Counter[str] = Counter()
    for node, seconds in zip(kernels, card.seconds(calls), strict=True):
        assert node.op is not None
        name = node.op.name
        weight = node.src[-2].dtype.name if "mat" in name or "prod" in name else ""
        taken[f"{name} {weight}".strip()] += 1e6 * seconds
        nodes[f"{name} {weight}".strip()] += 1
    return {name: [round(us), nodes[name]] for name, us in taken.most_common()}


def cpu(card: Card, file: str, options: Any, seconds: float) -> None:
    """The line of step.py, with the times that the device is faster."""
    script = [sys.executable, str(HERE / "step.py"), file, "--tokens", str(options.tokens)]
    script += ["--rank", str(options.rank), "--steps", "3"]
    done = subprocess.run(
        ["taskset", "-c", options.cores, *script],
        capture_output=True, text=True, check=False,
        env={**os.environ, "NUMBA_NUM_THREADS": str(len(options.cores.split(",")))},
    )  # fmt: skip
    if done.returncode:
        card.say("cpu", error=done.stderr[-500:])
        return
    line = json.loads(done.stdout.strip().splitlines()[-1])
    times = line["seconds"] / seconds if seconds else 0.0
    card.say("cpu", seconds=line["seconds"], cpu_cores=options.cores, times_faster=times, step=line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--rows", default="machine,product,step,op,cpu")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--compute", choices=("f32", "f16"), default="f16")
    parser.add_argument("--features", default=",".join(FEATURES))
    options = parser.parse_args()
    options.rows = options.rows.split(",")

    card = Card(options.compute, options.features)
    if "machine" in options.rows:
        machine(card, options.size)
    if "product" in options.rows:
        products(card, options.tokens)
    for file in options.models:
        seconds = steps(card, file, options) if "step" in options.rows else 0.0
        if "cpu" in options.rows:
            cpu(card, file, options, seconds)


if __name__ == "__main__":
    main()
