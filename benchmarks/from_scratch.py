"""Training steps of all tensors of a model: pyggml against PyTorch, compiled, on the same cores or
the same card.

usage: from_scratch.py --torch-python PATH/TO/python [--shape characters|10M|0.6B] [--rounds 20]
                       [--threads 2] [--batch N] [--layers N] [--device cpu|cuda]
                       [--sides A,B] [--ops] [--apart N]

characters is nanoGPT's model for CPUs (4 layers of width 128, 12 × 64 tokens, 65 of a vocabulary),
10M has 5 layers of width 384, 2,048 tokens and 8 × 256, 0.6B is Qwen3's with 512. All tensors train
by AdamW, random tokens are read. PATH has torch and transformers. Each side is a process of its
own; in turn they take some steps, as a run does one after the other, and medians of their means are
compared. Where they have no room together, --apart N starts N processes of each side, one after
the other in turns, and compares medians of theirs. Prints each process's JSON line and a table.

PyTorch has three sides: float32, autocast, whose products are in bfloat16 and whose weights and
AdamW are in float32, as ours, and bfloat16, where all of it is, weights and moments too, so that
small steps are lost. Ours has two more: matrices in bfloat16 whose steps are rounded by chance
(halves), and with them moments in 8 bits. On a card ours and autocast are measured unless --sides
says so. --ops says there where the time of ours goes (device.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from machine import about, median_seconds, peak_rss_gb
from sizes import HEAD, N_VOCAB, SIZES
from turns import Runner


class Shape(NamedTuple):
    """A llama, or where it has a size of Qwen3, that, and the sequences of a step."""

    n_layer: int
    width: int
    n_ff: int
    n_head: int
    n_vocab: int
    batch: int
    n_ctx: int
    size: str = ""


SHAPES = {
    "characters": Shape(4, 128, 352, 4, 65, 12, 64),
    "10M": Shape(5, 384, 1024, 6, 2048, 8, 256),
    "0.6B": Shape(28, 1024, 3072, 16, N_VOCAB, 1, 512, "0.6B"),
}
N_STEPS = 5  # of a turn: after others' turns a first step finds cold caches and sleeping threads
FLOAT32, AUTOCAST, BFLOAT16 = PYTORCH = ("PyTorch float32", "PyTorch autocast", "PyTorch bfloat16")
OURS, HALVES, BYTES = "pyggml", "pyggml halves", "pyggml halves 8bit"
OF_OURS = {OURS: (False, "adamw"), HALVES: (True, "adamw"), BYTES: (True, "adamw8bit")}
SIDES = (*OF_OURS, *PYTORCH)


class Side(NamedTuple):
    """What is measured: a step, what waits for its end, what is told of it afterwards."""

    step: Callable[[], None]
    wait: Callable[[], object]
    tell: Callable[[], Mapping[str, Any]]


def write_model(s: Shape, path: Path) -> None:
    """A fresh model, or one of random numbers, if a real size's."""
    import make_model

    from pyggml.fresh import Fresh, hyperparameters, write

    if s.size:
        make_model.write(path, SIZES[s.size], "BF16", s.n_layer)
        return
    sizes = {"block_count": s.n_layer, "embedding_length": s.width, "feed_forward_length": s.n_ff}
    heads = {"attention.head_count": s.n_head, "attention.head_count_kv": s.n_head}
    keys = {f"llama.{name}": n for name, n in (sizes | heads).items()}
    metadata = hyperparameters("llama", 10**6, s.n_vocab, s.n_ctx, keys=keys)
    no_text = {"tokenizer.ggml.model": "no_vocab", "llama.vocab_size": s.n_vocab}
    write(path, Fresh(metadata, s.n_vocab, no_text))


def card_of(options: argparse.Namespace) -> Any:
    """The card, before anything is in its memory; None on the CPU."""
    if options.device == "cpu":
        return None
    from device import Card

    return Card(0)


def load(s: Shape, backends: Sequence[Any], threads: int) -> Any:
    """The model, of a file that is gone again."""
    import pyggml

    pyggml.threads.set(threads)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        write_model(s, path)
        return pyggml.load(path, backends=backends)


def facts(card: Any, passes: Any, by_op: bool) -> dict[str, Any]:
    """What a step takes of a card, and by_op where its time goes."""
    from device import time_by_op, time_of_graph

    left = {f"{device}: {op}": why for (device, op), why in passes.training.fallbacks.items()}
    told = {"memory_gb": (card.empty - card.free()) / 1e9, "left_to_cpu": left}
    if by_op:
        told |= {"ops": time_by_op(card, passes.programs[0]), "graph": time_of_graph(card, passes)}
    return told


def of_pyggml(s: Shape, options: argparse.Namespace) -> Side:
    """Full training, what is trained in float32 or in halves."""
    from batches import random_batch

    from pyggml.lora import TrainConfig, train_tensors
    from pyggml.lora.optim import OPTIMISERS
    from pyggml.lora.ranks import ALONE
    from pyggml.lora.trainer.gradient import StepGradient
    from pyggml.lora.trainer.passes import Passes

    card = card_of(options)
    model = load(s, [card.backend] if card else (), options.threads)
    in_halves, name = OF_OURS[options.side]
    trained = train_tensors(model, ["*"], in_halves)
    p, n_tokens, devices = trained.parameters, s.batch * s.n_ctx, model.devices
    passes = Passes(trained.model, p, n_tokens, s.n_ctx)
    optimiser = OPTIMISERS[name](p, TrainConfig(optimiser=name), devices)
    optimiser.bind()  # moments of single tensors are leaves since then, which the device holds too
    devices.hold(*p.trained_leaves, *chain(*p.buffers.values()), *p.own_leaves.values())
    gradient = StepGradient(p, devices, ALONE)
    batch, done = random_batch(s.batch, s.n_ctx, s.n_vocab), [0]

    def step() -> None:
        done[0] += 1
        gradient.begin()
        passes.train(batch)
        optimiser.clip()
        optimiser.step(1e-3, done[0])

    if not card:
        return Side(step, lambda: None, dict)
    return Side(step, card.stream.synchronize, lambda: facts(card, passes, options.ops))


def of_torch(s: Shape, options: argparse.Namespace) -> Side:
    """transformers' model of the same shape, by torch.compile."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(options.threads)
    common = {
        "vocab_size": s.n_vocab,
        "hidden_size": s.width,
        "intermediate_size": s.n_ff,
        "num_hidden_layers": s.n_layer,
        "num_attention_heads": s.n_head,
        "max_position_embeddings": s.n_ctx,
        "tie_word_embeddings": True,
        "use_cache": False,
    }
    on_card = options.device == "cuda"
    narrow = torch.bfloat16 if options.side == BFLOAT16 else torch.float32
    with torch.device(options.device):
        heads = {"num_key_value_heads": SIZES[s.size].n_head_kv, "head_dim": HEAD} if s.size else {}
        llama, qwen = (LlamaForCausalLM, LlamaConfig), (Qwen3ForCausalLM, Qwen3Config)
        kind, config = qwen if s.size else llama
        model = kind(config(**common, **heads)).to(narrow).train()
    forward = torch.compile(model, dynamic=False)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(0, s.n_vocab, (s.batch, s.n_ctx), device=options.device)

    def step() -> None:
        autocast = torch.autocast(options.device, torch.bfloat16)
        with autocast if options.side == AUTOCAST else nullcontext():
            loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()

    if not on_card:
        return Side(step, lambda: None, dict)
    most = torch.cuda.max_memory_allocated
    return Side(step, torch.cuda.synchronize, lambda: {"memory_gb": most() / 1e9})


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The median step of one side."""
    s = SHAPES[options.shape]
    s = s._replace(batch=options.batch or s.batch, n_layer=options.layers or s.n_layer)
    side = (of_pyggml if options.side in OF_OURS else of_torch)(s, options)
    n_steps = 1 if s.size and options.device == "cpu" else N_STEPS
    side.step()

    def turn() -> None:
        for _ in range(n_steps):
            side.step()
        side.wait()

    seconds = median_seconds(turn, options.rounds, options.in_turns) / n_steps
    return {
        "side": options.side,
        "shape": options.shape,
        "layers": s.n_layer,
        "batch": s.batch,
        "ctx": s.n_ctx,
        "seconds": round(seconds, 5),
        "tokens_per_second": round(s.batch * s.n_ctx / seconds),
        "peak_rss_gb": round(peak_rss_gb(), 2),
        **side.tell(),
        **about("pyggml", "torch"),
    }


def race(options: argparse.Namespace) -> None:
    """All sides in turn; they get ready at the same time, or --apart each when its turn comes."""
    common = ["--shape", options.shape, "--rounds", str(options.rounds)]
    common += ["--threads", str(options.threads), "--device", options.device]
    common += ["--batch", str(options.batch), "--layers", str(options.layers)]
    common += ["--ops"] * options.ops
    sides = options.sides.split(",")

    def start(side: str) -> Runner:
        python = sys.executable if side in OF_OURS else options.torch_python
        return Runner(python, Path(__file__), "--side", side, *common)

    if options.apart:
        lines = [start(side).last(options.rounds) for side in sides * options.apart]
    else:
        with ThreadPoolExecutor() as pool:
            runners = [*pool.map(start, sides)]
        for _ in range(options.rounds):
            lines = [runner.turn() for runner in runners]
    print("".join(lines))
    rates: dict[str, list[int]] = {side: [] for side in sides}
    for result in map(json.loads, lines):
        rates[result["side"]].append(result["tokens_per_second"])
    ours, *_ = medians = [median(each) for each in rates.values()]
    for side, rate in zip(sides, medians, strict=True):
        print(f"{side:<18}{rate:>9,.0f} tokens/s{ours / rate:>7.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-python")
    parser.add_argument("--shape", choices=SHAPES, default="characters")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=0, help="sequences of a step")
    parser.add_argument("--layers", type=int, default=0, help="blocks, where all have no room")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--apart", type=int, default=0, help="processes of each side, one by one")
    parser.add_argument("--ops", action="store_true", help="where a card's time goes")
    parser.add_argument("--sides", help="of these, ours first; all of the CPU, or a card's")
    parser.add_argument("--side", choices=SIDES, help="measure this one alone")
    parser.add_argument("--in-turns", action="store_true", help="wait for a line before a step")
    options = parser.parse_args()
    of_device = (OURS, *PYTORCH) if options.device == "cpu" else (OURS, AUTOCAST)
    options.sides = options.sides or ",".join(of_device)
    if options.side:
        print(json.dumps(measure(options)))
    elif options.torch_python:
        race(options)
    else:
        parser.error("wanted --torch-python, an interpreter with torch and transformers")


if __name__ == "__main__":
    main()
