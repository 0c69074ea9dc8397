"""What an NVIDIA card does: LoRA steps, generation, products; beside others. A JSON line a row.

usage: device.py [MODEL.gguf …] [--rows machine,product,step,op,graph,decode,load,stream]
                 [--device 0] [--sizes 1x128,1x512,16x512] [--rank 8] [--steps 10] [--new 64]
                 [--past 512] [--grad-checkpointing] [--weight-copies 0.05] [--modules NAMES]
                 [--leave GB] [--sides "FLAGS; FLAGS"] [--peft-python PATH] [--unsloth-path DIR]
                 [--llama-bench PATH]

MODEL is a file that make_model.py writes with --size 1.7B. --leave: so many GB of the card are free
before steps, the others taken. --sides: the same step by PEFT and Unsloth, a process for each FLAGS
of card_step.py, all warm before the first is measured, one at a time: "--liger; --compile;
--unsloth; --unsloth --four-bit --checkpoint". --unsloth-path: where it and its needs lie.
--llama-bench: that program of llama.cpp's, of its CUDA backend. Rows, of which the first six are
run where none is named:

machine   the card's bandwidth (a copy, read and written; the best of ten medians) and its bfloat16
          rate (cuBLAS, 8192³)
product   each path of products that takes them, at the shapes of Qwen3-1.7B, by rows of x
step      a whole step of LoRA on all linear modules: tokens/s, memory, share of the bfloat16 rate
          (4 FLOP for each matrix weight and token); memory beyond an empty process's,
          and as --dry-run plans it; in use in all
op        where the time of one step, of one token and of a prompt goes; each node by itself
graph     one captured step, its launches in a line and side by side: milliseconds, and how many of
          the launches at least come one after the other
decode    tokens/s of one sequence after `past` tokens and share of the bandwidth over packed
          weights: of the likeliest tokens, which the card chooses, and where the host gets the
          logits before each; and tokens/s of a prompt of so many
load      GB/s at which weights go to the card; one copy from locked pages, and from others, of as
          many bytes
stream    a step whose blocks are made again in the backward pass (--grad-checkpointing), with all
          weights on the card, and with those of all blocks streamed, and as much parked with the
          host as then does not fit: seconds, memory, a sum of the adapter's bytes
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, count, islice, product
from math import prod
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from zlib import crc32

import numpy as np
from batches import random_batch
from device_sides import Side, llama_bench, take_turns
from step import matrix_weights

import pyggml
from pyggml.backends.cuda import cards, open_cuda
from pyggml.backends.cuda.gemm import PATHS, CudaOperands, CudaProblem, Factor
from pyggml.backends.cuda.runtime.captures import Capture
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backward import Keep
from pyggml.generation import Session
from pyggml.generation.passes import MOST_TOKENS
from pyggml.graph.arrays import array, is_constant
from pyggml.graph.dtypes import DTYPES
from pyggml.look.limits import matrix_uses
from pyggml.lora import Adapter, LoraConfig, TrainConfig, attach
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.optim import FlatAdamW
from pyggml.lora.ranks import ALONE
from pyggml.lora.trainer.gradient import StepGradient
from pyggml.lora.trainer.memory import held_bytes, on_devices
from pyggml.lora.trainer.passes import Passes
from pyggml.quants import quantize
from pyggml.runtime import Program

from machine import about

SHAPES = ((2048, 2048), (6144, 2048), (2048, 6144))  # n_out, n_in
ROUNDS, REPEATS = 20, 8


class Card:
    """The card that is measured, and the lines about it."""

    def __init__(self, index: int) -> None:
        every = {card.index: card for card in cards()}
        self.name = every[index].name
        self.backend = open_cuda(index)
        self.stream = self.backend.stream
        self.empty = self.free()
        self.bandwidth = self.flops = 0.0

    def free(self) -> int:
        """Bytes free, where nothing that is gone holds any."""
        gc.collect()
        return self.backend.memory()[0]

    def seconds(self, call: Callable[[], None], rounds: int = ROUNDS) -> float:
        """Median time of a call on the stream, by the card's own clock."""
        for _ in range(3):
            call()
        taken = []
        for _ in range(rounds):
            start, stop = cuda.event(), cuda.event()
            start.record(self.stream)
            call()
            stop.record(self.stream)
            stop.synchronize()
            taken.append(cuda.event_elapsed_time(start, stop) / 1e3)
        return median(taken)

    def say(self, row: str, **fields: Any) -> None:
        rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in fields.items()}
        packages = ("pyggml", "numba", "numba-cuda", "nvmath-python", "numpy")
        line = {"benchmark": f"device {row}", "device": self.name, **rounded, **about(*packages)}
        print(json.dumps(line), flush=True)


def share(rate: float, limit: float) -> float | None:
    """None where the row `machine`, which measures the limit, is not run."""
    return rate / limit if limit else None


# -- machine and products -----------------------------------------------------------------------


def machine(card: Card) -> None:
    n = 1 << 30
    source, target = (cuda.device_array(n, np.uint8) for _ in range(2))
    runs = [
        card.seconds(lambda: target.copy_to_device(source, stream=card.stream)) for _ in range(10)
    ]
    card.bandwidth = 2 * n / min(runs)  # the first of them finds a card that has been idle
    card.flops = 0.0
    for path in PATHS:
        if path.name == "cublas":
            size = 8192
            taken = _product_seconds(card, path, size, size, size, "BF16")
            card.flops = 2 * size**3 / taken
    card.say("machine", gb_per_second=card.bandwidth / 1e9, bf16_tflops=card.flops / 1e12)


def _random(n: int, dtype: type) -> Any:
    rng = np.random.default_rng(0)
    if dtype is np.float32:
        return cuda.to_device(rng.standard_normal(n, np.float32))
    return cuda.to_device(rng.standard_normal(n, np.float32).view(np.uint32) >> 16)


def _product_seconds(
    card: Card, path: Any, rows: int, n: int, k: int, kind: str, back: bool = False
) -> float:
    """x (rows, k) · W (n, k)ᵀ, or with `back` x (rows, n) · W; W in random blocks of `kind`."""
    dtype = DTYPES[kind]
    rng = np.random.default_rng(0)
    some = quantize(rng.standard_normal((64, k), np.float32), kind)
    w = cuda.to_device(np.tile(some.reshape(64, -1).view(np.uint8), (n // 64, 1)).reshape(-1))
    w = w.view(dtype.numpy)
    if back:
        n, k = k, n
    step = Factor(1, n, dtype=dtype) if back else Factor(k, 1, dtype=dtype)
    p = CudaProblem(rows, n, k, Factor(k, 1), step, compute="bf16")
    if not path.takes(p):
        return 0.0
    x, y = _random(rows * k, np.float32), cuda.device_array(rows * n, np.float32)
    scratch = cuda.device_array(max(path.scratch(p), 1), np.uint8)
    call = path.bind(p, CudaOperands(y, x, w, scratch, False, card.stream))
    return card.seconds(Capture([call] * REPEATS, card.stream), 5) / REPEATS


def products(card: Card) -> None:
    for kind in ("Q8_0", "Q4_K", "Q6_K"):
        for rows in (1, 8, 128, 512, 8192):
            for n, k in SHAPES:
                for path, back in product(PATHS, (False, True)):
                    if path.name == "simt" and rows > 512:
                        continue
                    taken = _product_seconds(card, path, rows, n, k, kind, back)
                    if taken:
                        of_weights = DTYPES[kind].row_bytes(k) * n
                        card.say(
                            "product", path=path.name, type=kind, rows=rows, n=n, k=k, back=back,
                            microseconds=taken * 1e6, tflops=2 * rows * n * k / taken / 1e12,
                            weights_gb_per_second=of_weights / taken / 1e9,
                        )  # fmt: skip


# -- training steps -----------------------------------------------------------------------------


@contextmanager
def stepping(
    adapter: Adapter, passes: Passes, size: tuple[int, int]
) -> Iterator[Callable[[], float]]:
    """A function that takes a step and returns the seconds."""
    parameters, model, numbers = adapter.parameters, adapter.model, count(1)
    batch = random_batch(*size, model.config.n_vocab)
    with model.devices.holding(*chain(*parameters.buffers.values())):
        optimiser = FlatAdamW(parameters, TrainConfig(), model.devices)
        gradient = StepGradient(parameters, model.devices, ALONE)

        def step() -> float:
            began = perf_counter()
            gradient.begin()
            loss = passes.begin(batch, alone=False)
            length = optimiser.begin_clip()  # before the loss is waited for, as trainers do
            optimiser.begin(1e-4, next(numbers))
            loss(), length()
            optimiser.update()
            return perf_counter() - began

        yield step


def steps(card: Card, file: str, size: tuple[int, int], options: Any) -> None:
    n_sequences, n_ctx = size
    n = n_sequences * n_ctx
    ballast = leave(card, options.leave)
    model = pyggml.load(file, backends=[card.backend])
    modules = tuple(options.modules.split(",")) if options.modules else None
    config = LoraConfig(rank=options.rank, alpha=2.0 * options.rank, modules=modules)
    adapter = attach(model, config)
    card.backend.copies_from = options.weight_copies
    keep = Keep.LAYERS if options.grad_checkpointing else Keep.COSTLY
    passes = Passes(adapter.model, adapter.parameters, n, n_ctx, keep)
    with stepping(adapter, passes, size) as step:
        first, *taken = (step() for _ in range(3 + options.steps))
        taken = taken[2:]  # the second captures
        fields = {"model": Path(file).name, "batch": n_sequences, "ctx": n_ctx}
        fields |= {"grad_checkpointing": options.grad_checkpointing}
        fields |= memory(card, passes, adapter.parameters, ballast)
        look_inside(card, passes, fields, options.rows)
    speed = n / median(taken)
    left = {f"{device}: {op}": why for (device, op), why in passes.training.fallbacks.items()}
    card.say(
        "step", **fields, rank=options.rank, seconds=median(taken), tokens_per_second=speed,
        share_of_peak=share(4 * matrix_weights(model) * speed, card.flops), left_to_cpu=left,
        seconds_to_first_step=first,
    )  # fmt: skip


def leave(card: Card, gigabytes: float) -> Any:
    """What takes all but so much of the card's free memory, as long as it lives."""
    n_bytes = card.free() - int(gigabytes * 1e9) if gigabytes else 0
    return cuda.device_array(max(0, n_bytes), np.uint8)


def memory(card: Card, passes: Passes, parameters: Parameters, ballast: Any) -> dict[str, float]:
    """What a step has taken, and what --dry-run says; what is in use in all, with the driver's."""
    free, total = card.free() + ballast.size, card.backend.memory()[1]
    (planned,) = on_devices(passes, parameters, held_bytes(parameters, TrainConfig()))
    return {
        "memory_gb": (card.empty - free) / 1e9, "in_use_gb": (total - free) / 1e9,
        "planned_gb": planned.n_bytes / 1e9,
    }  # fmt: skip


def time_by_op(card: Card, program: Program) -> dict[str, list[float]]:
    """Op and type of its weight -> [microseconds in a run, nodes], the longest first.

    Nodes of the same shapes count as the first of them, which is captured and repeated: a launch
    from Python takes longer than most kernels. All run in their order, so that each finds its
    arguments: of experts that were chosen by chance, or by none, products take another time.
    """
    seconds: dict[tuple[Any, ...], float] = {}
    taken: Counter[str] = Counter()
    nodes: Counter[str] = Counter()
    for node, call in program.kernels[card.backend].items():
        shapes = tuple((s.shape, s.dtype.name, s.strides) for s in node.src)
        alike = (node.op.name, node.shape, shapes)
        call()
        if alike not in seconds:
            seconds[alike] = card.seconds(Capture([call] * REPEATS, card.stream), 5) / REPEATS
        weight = next((s.dtype.name for s in node.src if s.dtype.quantised), "")
        taken[f"{node.op.name} {weight}".strip()] += 1e6 * seconds[alike]
        nodes[f"{node.op.name} {weight}".strip()] += 1
    return {name: [round(us), nodes[name]] for name, us in taken.most_common()}


def look_inside(card: Card, passes: Passes, fields: dict[str, Any], rows: list[str]) -> None:
    if "op" in rows:
        card.say("op", **fields, microseconds=time_by_op(card, passes.programs[0]))
    if "graph" in rows:
        card.say("graph", **fields, **time_of_graph(card, passes))


def time_of_graph(card: Card, passes: Passes) -> dict[str, float]:
    """The launches of a training pass in a line, and side by side as far as memory allows."""
    works = (call.arguments[0] for call in passes.programs[0].calls if call.arguments)
    graph = next(one for one in works if isinstance(one, Capture))
    depths: list[int] = []
    for waits in graph.waits() if graph.waits else ():
        depths.append(1 + max((depths[i] for i in waits), default=0))
    line = card.seconds(Capture(graph.calls, card.stream), 5)
    side = card.seconds(Capture(graph.calls, card.stream, graph.waits), 5)
    return {
        "launches": len(graph.calls), "longest_path": max(depths),
        "milliseconds_in_a_line": 1e3 * line, "milliseconds_side_by_side": 1e3 * side,
    }  # fmt: skip


# -- weights that go to the card ----------------------------------------------------------------


def load(card: Card, file: str) -> None:
    model = pyggml.load(file, backends=[card.backend])
    weights = [w for w in model.parts.weights.values() if is_constant(w)]
    n, largest = sum(w.n_bytes for w in weights), max(weights, key=lambda w: w.n_bytes)
    model.lack_in_use()  # what loads a model has planned a pass; the file's first bytes are locked
    began = perf_counter()
    model.devices.load(weights, card.backend)
    taken = perf_counter() - began
    copy = model.devices.copy_of(largest, card.backend)
    plain = card.seconds(lambda: card.backend.write(copy, array(largest)), 3)
    send = card.backend.bind_stream(copy, array(largest))
    locked = largest.n_bytes / card.seconds(send, 3) / 1e9
    rates = {"gb_per_second": n / taken / 1e9, "locked_gb_per_second": locked}
    card.say(
        "load", model=Path(file).name, bytes=n, seconds=taken, **rates,
        plain_gb_per_second=largest.n_bytes / plain / 1e9, share_of_locked=n / taken / 1e9 / locked,
    )  # fmt: skip


def stream(card: Card, file: str, size: tuple[int, int], options: Any) -> None:
    """Both in the same memory, which is as little as --leave says; what does not fit is said."""
    n = prod(size)
    ballast = leave(card, options.leave)
    for is_streamed in (False, True):
        model = pyggml.load(file, backends=[card.backend], stream_weights="off")
        model.stream(model.config.n_layer if is_streamed else 0)
        adapter = attach(model, LoraConfig(rank=options.rank, alpha=2.0 * options.rank))
        passes, lack = passes_that_fit(card, adapter, size)
        if lack:
            card.say("stream", model=Path(file).name, batch=size[0], ctx=size[1], lack=lack)
            continue
        with stepping(adapter, passes, size) as step:
            first, *taken = (step() for _ in range(3 + options.steps))
            fields = memory(card, passes, adapter.parameters, ballast)
        card.say(
            "stream", model=Path(file).name, batch=size[0], ctx=size[1], rank=options.rank,
            streamed_bytes=passes.training.n_streamed, parked_bytes=passes.training.n_parked,
            seconds=median(taken[2:]),
            tokens_per_second=n / median(taken[2:]), unpacked=len(card.backend.unpacked),
            seconds_to_first_step=first, leave_gb=options.leave, **fields,
            crc_of_adapter=crc32(adapter.parameters.data.tobytes()),
        )  # fmt: skip
        del model, adapter, passes, step
        card.free()
    del ballast


def passes_that_fit(
    card: Card, adapter: Adapter, size: tuple[int, int]
) -> tuple[Passes, str | None]:
    """A step's passes, with as much parked as the card's memory requires; and what it lacks."""
    parameters, devices, n_before = adapter.parameters, adapter.model.devices, -1
    while True:
        passes = Passes(adapter.model, parameters, prod(size), size[1], Keep.LAYERS)
        (planned,) = on_devices(passes, parameters, held_bytes(parameters, TrainConfig()))
        n = passes.training.n_parked
        if planned.lacks is None or adapter.model.streaming is None or n <= n_before:
            return passes, planned.lacks
        n_before, devices.parked = n, n + planned.n_bytes - card.free()


# -- generation ---------------------------------------------------------------------------------


def decode(card: Card, file: str, options: Any) -> None:
    model = pyggml.load(file, backends=[card.backend])
    tokens = np.random.default_rng(1).integers(0, model.config.n_vocab, options.past)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        session = Session(model, options.past + options.new + 8)
        began = perf_counter()
        session.feed(tokens)
        first, prompts, taken = perf_counter() - began, [], []
        for _ in range(4):  # the first of them captures
            session.truncate(0)
            began = perf_counter()
            session.feed(tokens)
            prompts.append(perf_counter() - began)
        for i in range(options.new):
            began = perf_counter()
            session.feed([i])
            taken.append(perf_counter() - began)
        session.truncate(0)
        ahead = [perf_counter() for _ in islice(session.greedy(tokens), options.new)]
    left = [str(w.message) for w in said if "leaves" in str(w.message)]
    packed = sum(part * w.n_bytes for w, part in matrix_uses(model))
    speed, by_host = 1 / median(np.diff(ahead)[3:]), 1 / median(taken[3:])
    card.say(
        "decode", model=Path(file).name, past=options.past, tokens_per_second=speed,
        share_of_bandwidth=share(packed * speed, card.bandwidth),
        tokens_per_second_by_host=by_host,
        share_of_bandwidth_by_host=share(packed * by_host, card.bandwidth),
        first_prompt_seconds=first,
        left_to_cpu=left, prompt_tokens_per_second=options.past / median(prompts[1:]),
        memory_gb=(card.empty - card.free()) / 1e9,
    )  # fmt: skip
    if "op" in options.rows:
        for row, n in (("token", 1), ("prompt", min(options.past, MOST_TOKENS))):
            bound = session._batch._passes[model, n, 1].program
            card.say(row, model=Path(file).name, microseconds=time_by_op(card, bound))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--rows", default="machine,product,step,op,graph,decode")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--sizes", default="1x128,1x512,16x512")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--past", type=int, default=512)
    parser.add_argument("--grad-checkpointing", action="store_true")
    parser.add_argument("--weight-copies", type=float, default=TrainConfig().weight_copies)
    parser.add_argument("--sides", default="")
    parser.add_argument("--peft-python", default=sys.executable)
    parser.add_argument("--unsloth-path", default="")
    parser.add_argument("--llama-bench")
    parser.add_argument("--modules", help="that get an adapter, of the rows step, op and graph")
    parser.add_argument("--leave", type=float, default=0.0)
    options = parser.parse_args()
    options.rows = options.rows.split(",")
    sizes = [tuple(int(n) for n in size.split("x")) for size in options.sizes.split(",")]

    if options.sides:  # before anything of ours is in the card's memory
        take_turns([Side(flags.strip(), options) for flags in options.sides.split(";")])
    for file in options.models if options.llama_bench else ():
        llama_bench(options, file)
    card = Card(options.device)
    if "machine" in options.rows:
        machine(card)
    if "product" in options.rows:
        products(card)
    for file in options.models:
        for size in sizes if "step" in options.rows else ():
            steps(card, file, size, options)
        if "load" in options.rows:
            load(card, file)
        for size in sizes if "stream" in options.rows else ():
            stream(card, file, size, options)
        if "decode" in options.rows:
            decode(card, file, options)


if __name__ == "__main__":
    main()
