"""The whole pipeline on a small model: stage by stage, and what each stage made.

usage: python examples/walkthrough.py [MODEL.gguf]        (default: the model of the demo)

Read it from `main` on. Building, planning and computing are three moments: no number of the model
is computed before stage 6. `pyggml.lora.Trainer` does the same, over a whole text.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from pyggml.cli.demo import BASE, TEXT
from pyggml.lora import LoraConfig, Parameters, TrainConfig, attach
from pyggml.lora.optim import AdamW

import pyggml
from pyggml import Model, gguf, models
from pyggml.alloc import plan
from pyggml.backward import build_backward
from pyggml.graph import Graph
from pyggml.model import fill
from pyggml.models import Inputs, build, build_loss
from pyggml.runtime import Program, bind
from pyggml.tensor import Tensor, leaf

N_TOKENS = 64
N_STEPS = 20
STEP = 0.03  # of the finite difference, along a direction of length 1


def main(path: str | Path = BASE) -> None:
    # A file becomes metadata and memory-mapped tensors.
    file = gguf.open(path)
    n_bytes = sum(t.n_bytes for t in file.tensors.values())
    say(1, "gguf.open", f"{len(file.metadata)} keys, {len(file.tensors)} tensors, {n_bytes:,} bytes")
    show(list(file.tensors.values()), 3)

    # Config, weights and empty inputs become a graph from tokens to logits.
    model = Model(file, models.read(file), compute="auto")
    inputs = Inputs.empty(N_TOKENS)
    forward = Graph.of(build(model.parts, inputs))
    say(2, "models.build", f"{len(forward.nodes)} nodes; after the embedding and in the end:")
    show(str(forward).splitlines()[:6] + ["...", forward.outputs[0]], 8)

    # Every linear module gets an update B(A x). B = 0, so that it changes nothing yet.
    adapter = attach(model, LoraConfig(rank=4, alpha=8.0))
    parameters = adapter.parameters
    trained = list(parameters.tensors.values())
    say(3, "lora.attach", f"{len(adapter.pairs)} pairs, {parameters.n_trained:,} numbers to train")
    show(trained, 2)

    # The loss and a gradient for every parameter, in the same graph.
    ids = model.checked(model.tokenizer.encode(TEXT.read_text(encoding="utf-8")[:4000]))
    targets = leaf(ids[1 : N_TOKENS + 1].copy(), "targets")
    weights = leaf(np.full(N_TOKENS, 1 / N_TOKENS, np.float32), "weights")
    loss = build_loss(model.parts, inputs, targets, weights, model.adapters)
    gradients = build_backward(loss, trained, accumulators=list(parameters.gradients.values()))
    graph = Graph.of(loss, *gradients)
    n_forward = len(Graph.of(loss).nodes)
    say(4, "build_backward", f"{n_forward} nodes forward, {len(graph.nodes) - n_forward} backward")
    show(graph.nodes[n_forward:], 3)

    # An offset in one arena for every tensor; memory is used again as soon as it is free.
    p = plan(graph)
    apart = plan(graph, reuse=False).n_bytes
    say(5, "alloc.plan", f"{p.n_bytes:,} bytes, where tensors side by side would take {apart:,}")
    show([f"byte {offset:>9,}  {t!r}" for t, offset in p.offsets.items()], 3)

    # Memory is taken, every kernel is bound to it once, and they run in order.
    program = bind(p)
    fill(inputs, ids[:N_TOKENS])
    before = run(program, loss, parameters)
    say(6, "runtime.compute", f"{len(program.calls)} kernel calls; loss {before:.5f}")
    check_slope(program, loss, parameters, trained[1])

    # AdamW changes all parameters in place; the loss of these few tokens falls.
    optimiser = AdamW(parameters, TrainConfig())
    say(7, "lora.optim.step", f"{N_STEPS} steps:")
    for n in range(1, N_STEPS + 1):
        length = optimiser.clip()
        optimiser.step(1e-2, n)
        after = run(program, loss, parameters)
        if n in (1, N_STEPS):
            print(f"      step {n:2}: loss {after:.5f}, gradient of length {length:.3f}")

    # A file that llama.cpp loads, and so does pyggml: the same logits come out.
    with TemporaryDirectory() as folder:
        saved = Path(folder) / "adapter.gguf"
        adapter.save(saved)
        again = pyggml.load(path, adapter=saved)
        far = np.abs(again.logits(ids[:N_TOKENS]) - model.logits(ids[:N_TOKENS])).max()
        say(8, "lora.adapter.save", f"{saved.stat().st_size:,} bytes; loaded again, its logits are")
        print(f"      {far:.1e} away; the loss went from {before:.3f} to {after:.3f}")


def run(program: Program, loss: Tensor, parameters: Parameters) -> float:
    """Compute everything anew: the loss; the gradients are then in the parameters' buffer."""
    parameters.gradient[:] = 0
    program()
    return float(loss.data)


def check_slope(program: Program, loss: Tensor, parameters: Parameters, t: Tensor) -> None:
    """A gradient's length is the slope of the loss along it, here from a finite difference."""
    gradient = parameters.gradients[t.name].data.copy()
    length = np.linalg.norm(gradient)
    start, direction = t.data.copy(), gradient / length
    ends = []
    for h in (STEP, -STEP):
        t.data[:] = start + h * direction
        ends.append(run(program, loss, parameters))
    t.data[:] = start
    run(program, loss, parameters)
    slope = (ends[0] - ends[1]) / (2 * STEP)
    print(f"      {t.name}: gradient's length {length:.5f}, finite difference {slope:.5f}")


def say(number: int, verb: str, made: str) -> None:
    print(f"\n{number}  {verb:<18} {made}")


def show(things: list | tuple, n: int) -> None:
    for thing in things[:n]:
        print(f"      {thing}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
