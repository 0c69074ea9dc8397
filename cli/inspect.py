"""`pyggml inspect`: metadata, tensors, and the plan of a training step, of which nothing is run."""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path

import click
import numpy as np

from pyggml import gguf, load
from pyggml.alloc import Plan
from pyggml.alloc.usage import Moment, peak
from pyggml.backward import Keep
from pyggml.cli.machine import say_machine
from pyggml.cli.options import PATH, SETTINGS
from pyggml.cli.show import count, plural, printable, row, say, size
from pyggml.errors import ConfigError
from pyggml.lora import DataConfig, LoraConfig, TrainConfig, attach
from pyggml.lora.passes import Passes

_SHOWN = 60  # characters of a value
_KINDS = 20  # of tensors at the peak


@click.command("inspect", context_settings=SETTINGS)
@click.option("-m", "--model", type=PATH, help="any GGUF file")
@click.option("--machine", is_flag=True, help="what computes on this machine, and why")
@click.option("--tensors", is_flag=True, help="list the tensors")
@click.option("--plan", is_flag=True, help="plan one pass of LoRA training, without running it")
@click.option("--ctx", type=click.IntRange(min=2), default=DataConfig.ctx, show_default=True)
@click.option("--batch", type=click.IntRange(min=1), default=TrainConfig.batch, show_default=True)
@click.option("--grad-checkpointing", is_flag=True, help="with layers computed again")
def command(
    model: Path | None,
    machine: bool,
    tensors: bool,
    plan: bool,
    ctx: int,
    batch: int,
    grad_checkpointing: bool,
) -> None:
    """What is in a GGUF file, and with --plan what training it would take."""
    if machine:
        say_machine()
    if model is None:
        if not machine:
            raise ConfigError("wanted -m MODEL.gguf or --machine")
        return
    with gguf.open(model) as file:
        _say_file(file)
        if tensors:
            _say_tensors(file)
    if plan:
        _say_plan(model, ctx, batch, Keep.LAYERS if grad_checkpointing else Keep.COSTLY)


def _say_file(file: gguf.GGUFFile) -> None:
    row("file", f"{file.path}, GGUF version {file.version}, {size(file.n_bytes)}")
    for key, field in file.metadata.items():
        say(f"  {printable(key):<44} {_value(field)}")
    by_type: dict[str, list[int]] = {}
    for t in file.tensors.values():
        by_type.setdefault(t.dtype.name, []).append(t.n_bytes)
    n = sum(prod(t.shape) for t in file.tensors.values())
    row("tensors", f"{plural(len(file.tensors), 'tensor')}, {count(n)} parameters")
    for name, sizes in by_type.items():
        say(f"  {name:<8} {len(sizes):5}  {size(sum(sizes))}")


def _value(field: gguf.Field) -> str:
    value = field.value
    if isinstance(value, gguf.StringArray | np.ndarray):
        some = ", ".join(repr(v) if isinstance(v, str) else str(v) for v in value[:4])
        text = f"[{len(value)}] {some}" + (", …" if len(value) > 4 else "")
    else:
        text = repr(value)
    text = printable(text)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _say_tensors(file: gguf.GGUFFile) -> None:
    for t in file.tensors.values():
        shape = " × ".join(str(n) for n in t.shape)
        say(f"  {printable(t.name):<40} {t.dtype.name:<8} {shape:<16} {size(t.n_bytes)}")


def _say_plan(path: Path, ctx: int, batch: int, keep: Keep) -> None:
    model = load(path)
    if ctx > model.config.n_ctx:
        raise ConfigError([("ctx", f"is {ctx}, wanted at most the model's {model.config.n_ctx}")])
    adapter = attach(model, LoraConfig())
    passes = Passes(adapter.model, adapter.parameters, batch * ctx, n_ctx=ctx, keep=keep)
    (training,) = passes.training.plans.values()
    nodes = training.graph.nodes
    row("plan", f"one pass over {plural(batch, 'window')} of {ctx} tokens, rank {LoraConfig.rank}")
    row("", f"{size(training.n_bytes)} for the graph, {size(adapter.parameters.n_bytes())} for "
            "adapter, gradient and optimiser")  # fmt: skip
    row("", f"{len(nodes):,} nodes, of which {len(training.reused):,} overwrite a source")
    for name, n in Counter(t.op.name for t in nodes if t.op is not None).most_common():
        say(f"  {name:<24} {n:5}")
    _say_fused(training)
    _say_peak(peak(training))


def _say_fused(training: Plan) -> None:
    """Where one kernel does the work of several ops, and what several kernels share."""
    made = Counter(t.op for t in training.graph.nodes if t.op is not None and t.op.fuses)
    row("fused", "one kernel for several ops, and packings of activations that products share")
    for op, n in made.most_common():
        say(f"  {op.name:<24} {n:5}  {', '.join(op.fuses)}")
    n_packings = len(set(training.shared.values()))
    say(f"  {'shared packings':<24} {n_packings:5}  of {plural(len(training.shared), 'product')}")


def _say_peak(moment: Moment) -> None:
    """What lies in memory when there is most of it."""
    node = moment.node
    name = node.name or (node.op.name if node.op else "")
    row("peak", f"{size(moment.n_bytes)} while node {moment.index:,}, {printable(name)}, runs")
    for kind, n, n_bytes in moment.by_kind()[:_KINDS]:
        say(f"  {kind:<44} {n:5}  {size(n_bytes)}")
