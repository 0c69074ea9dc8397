"""The whole pipeline on a small model, one stage after the other, and what each stage made.

usage: python examples/walkthrough.py [MODEL.gguf]        (default: the model of the demo)

Building, planning and computing are three moments: no number of the model is computed before
stage 6. `pyggml.lora.Trainer` does the same over a whole text.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from pyggml import Model, gguf, load, models
from pyggml.alloc import plan
from pyggml.backends.cpu import CPU
from pyggml.backward import Keep, build_backward, rematerialise, round_large
from pyggml.cli.demo import BASE, TEXT
from pyggml.graph import Graph
from pyggml.graph.arrays import read, write
from pyggml.graph.tensor import Tensor, leaf
from pyggml.lora import LoraConfig, Parameters, TrainConfig, attach
from pyggml.lora.optim import FlatAdamW
from pyggml.models import Inputs, build, build_loss
from pyggml.models.texts import fill
from pyggml.runtime import Devices, Program, bind, schedule

N_TOKENS, N_STEPS = 64, 10


def main(path: str | Path = BASE) -> None:
    # A file is metadata and tensors, mapped into memory.
    file = gguf.open(path)
    tensors = list(file.tensors.values())
    say(1, "gguf.open", f"{len(file.metadata)} keys, {len(tensors)} tensors")
    show(*(f"{t.name} {t.dtype}{list(t.shape)}, {t.n_bytes:,} bytes" for t in tensors[:4]))

    # Every linear module gets an update B(A x); B is zero, so nothing changes yet.
    base = Model(file, models.read(file), compute="auto")
    adapter = attach(base, LoraConfig(rank=4, alpha=8.0))
    say(2, "lora.attach", f"{len(adapter.pairs)} pairs: {adapter.parameters.n_trained:,} numbers")
    show(*list(adapter.parameters.tensors.values())[:2])

    # Weights, updates and inputs yet to be filled make a graph from tokens to logits.
    model = adapter.model
    forward = Graph.of(build(model.parts, Inputs.empty(N_TOKENS), model.adapters))
    say(3, "models.build", f"{len(forward.nodes)} nodes, from tokens to {forward.outputs[0]}:")
    show(*str(forward).splitlines()[:6])

    ids = model.check_tokens(model.tokenizer.encode(TEXT.read_text("utf-8"))[: N_TOKENS + 1])
    program, loss = differentiate(model, adapter.parameters, ids)

    # AdamW changes the parameters in place.
    optimiser = FlatAdamW(adapter.parameters, TrainConfig())
    say(7, "lora.optim.FlatAdamW.step", f"{N_STEPS} of them on the same {N_TOKENS} tokens:")
    for n in range(1, N_STEPS + 1):
        optimiser.clip()
        optimiser.step(5e-3, n)
        show(f"after step {n:2}: loss {run(program, loss, adapter.parameters):.5f}")

    # The adapter's file is one that llama.cpp loads; loaded here, it gives the same logits.
    with TemporaryDirectory() as folder:
        saved = Path(folder) / "adapter.gguf"
        adapter.save(saved)
        say(8, "lora.adapter.Adapter.save", f"{saved.stat().st_size:,} bytes")
        far = np.abs(load(path, adapter=saved).logits(ids) - model.logits(ids)).max()
        show(f"loaded again: logits differ by {far:.1e} at most")


def differentiate(model: Model, p: Parameters, ids: np.ndarray) -> tuple[Program, Tensor]:
    # A gradient for every parameter joins the graph of the loss.
    inputs, targets = Inputs.empty(N_TOKENS), leaf(ids[1:], "targets")
    weights = leaf(np.full(N_TOKENS, 1 / N_TOKENS, np.float32), "weights")
    forward = build_loss(model.parts, inputs, targets, weights, model.adapters)
    sums = list(p.gradients.values())
    graph = build_backward(forward, list(p.tensors.values()), accumulators=sums)
    loss, n_forward = graph["loss"], len(forward.nodes)
    n_back = len(graph.nodes) - n_forward
    say(4, "backward.build_backward", f"{n_forward} nodes to the loss, {n_back} back:")
    show(*str(graph).splitlines()[-4:])

    # What is large is kept as a rounded copy, what is cheap is made again before it is read. Each
    # pass makes a new graph; what it does not change is the same tensor in both.
    rounded = round_large(graph, model.kept_as)
    kept = rematerialise(rounded, Keep.COSTLY)
    show(f"as the gradients read it: an arena of {plan(graph, CPU()).n_bytes:,} bytes")
    for verb, now, before in (("round_large", rounded, graph), ("rematerialise", kept, rounded)):
        n_new = len(set(now.nodes) - set(before.nodes))
        show(f"{verb}: {n_new} new nodes, {plan(now, CPU()).n_bytes:,} bytes")

    # The CPU computes all of it, and every tensor gets its place in one arena; a place is used
    # again once its tensor is dead.
    made, apart = schedule(kept, Devices()), plan(kept, CPU(), reuse=False)
    say(5, "runtime.schedule", f"{made.n_bytes:,} bytes; no place used twice: {apart.n_bytes:,}")
    (layout,) = made.plans.values()
    show(*(f"byte {offset:<9,} {t}" for t, offset in list(layout.offsets.items())[:4]))

    # Memory is taken, each node's kernel is bound to it once, and all run in order.
    program = bind(made)
    fill(inputs, ids[:-1])
    value = run(program, loss, p)
    say(6, "runtime.bind", f"{len(program.calls)} kernel calls; the loss is {value:.5f}")

    check_slope(program, loss, p)
    return program, loss


def check_slope(program: Program, loss: Tensor, p: Parameters) -> None:
    # The loss rises along a gradient as fast as the gradient is long.
    name, t = list(p.tensors.items())[-1]
    gradient, h = read(p.gradients[name]), 0.01
    length, ends = np.linalg.norm(gradient), []
    for step in (h, -h):
        write(t, gradient / length * step)  # a B, which was zero
        ends.append(run(program, loss, p))
    write(t, 0)
    run(program, loss, p)
    slope = (ends[0] - ends[1]) / (2 * h)
    show(f"d(loss)/d({name}): length {length:.5f}, finite difference {slope:.5f}")


def run(program: Program, loss: Tensor, parameters: Parameters) -> float:
    """Compute the whole graph: the loss, and in `parameters.gradient` its gradients."""
    parameters.gradient[:] = 0
    program()
    return float(program.read(loss))


def say(number: int, verb: str, made: str) -> None:
    print(f"\n{number}  {verb:<26} {made}")


def show(*lines: object) -> None:
    print(*(f"      {line}" for line in lines), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:2])
