"""`--dry-run`: the memory of a run by part, and its time, measured on one step."""

from collections.abc import Sequence

import numpy as np

from pyggml import threads
from pyggml.cli.commands.finetune.memory import RunBytes
from pyggml.cli.commands.finetune.results import SMALLER
from pyggml.cli.terminal.show import plural, row, say, size, span
from pyggml.errors import DeviceMemoryError
from pyggml.lora import Corpus, Trainer
from pyggml.lora.data.prompts import Prompts
from pyggml.lora.trainer.memory import OnDevice


def say_plan(trainer: Trainer, parts: RunBytes, devices: Sequence[OnDevice] = ()) -> None:
    """Print the plan. Two steps are made in memory; nothing is written to the disk.

    Raises DeviceMemoryError, before a step is made, if a device has too little memory free.
    """
    if not isinstance(trainer.corpus.train, Prompts):  # whose windows are made on the way
        _say_windows(trainer.corpus)
    weights = trainer.reserve().weights
    row("peak", f"about {size(parts.own)} of its own, of which")
    work = f"at most {size(parts.scratch)} of it scratch of {plural(threads.most(), 'thread')}"
    for n_bytes, what in (
        (parts.process, "interpreter, text, trained parameters, kernels and their compiler"),
        (parts.arena, f"activations and gradients of the graph (arena), {work}"),
        (parts.state, "gradients, optimizer state"),
        (parts.after, "at the end, when these two are free: languages of rows, KV cache"),
    ):
        row("", f"{size(n_bytes):>8}  {what}")
    row("files", f"and {size(parts.files)} mapped, which the system can take back, of which")
    row("", f"{size(parts.libraries):>8}  libraries")
    if weights:
        largest = f"the largest weight; all {size(weights)} stay in the file, which answers read"
        row("", f"{size(parts.weights):>8}  {largest}")
    for device in devices:
        _say_device(device)
    left = trainer.n_steps - trainer.progress.step  # before two steps are made
    seconds = trainer.rehearse()
    row("time", f"{span(seconds)} a step: {span(seconds * left)} and the validations")
    say()
    row("dry run", "nothing was written; without --dry-run this is done")


def _say_device(device: OnDevice) -> None:
    """Print the parts of a device's memory; DeviceMemoryError if it has less."""
    memory = device.backend.memory()
    of = f" of {size(memory[0])} that are free" if memory else ""
    row(device.backend.name, f"about {size(device.n_bytes)}{of}, of which")
    for n_bytes, what in (
        (device.weights, "weights"),
        (device.unpacked, "the same in bfloat16, as many as half of what is left has room for"),
        (device.parameters, "trained parameters, gradients, optimizer state"),
        (device.arena, "activations and gradients of the graph (arena)"),
        (device.cache, "KV cache of the answers before and after"),
        (device.own, "kernels, captured graphs and libraries"),
    ):
        if n_bytes:
            row("", f"{size(n_bytes):>8}  {what}")
    if device.lacks:
        raise DeviceMemoryError([device.lacks, SMALLER])


def _say_windows(corpus: Corpus) -> None:
    """Print how full the windows are, and what they hold."""
    train = corpus.train
    n_computed = train.n_computed()
    padding = 1 - np.count_nonzero(train.documents >= 0) / (n_computed + len(train))
    learned = train.n_targets() / n_computed
    n = corpus.n_documents - corpus.n_held_out
    packed = f"{plural(n, 'sample')}, {n / len(train):.3g} to a window; " if n > 1 else ""
    row(
        "windows",
        f"{packed}{100 * padding:.2g} % padding, {100 * learned:.3g} % of the tokens learned",
    )
