"""`--dry-run`: the memory of a run by part, and its time, measured on one step."""

from __future__ import annotations

import numpy as np

from pyggml.cli.finetune.memory import Parts
from pyggml.cli.show import plural, row, say, size, span
from pyggml.lora import Corpus, Trainer


def say_plan(trainer: Trainer, parts: Parts) -> None:
    """Print the plan. Two steps are made in memory; nothing is written to the disk."""
    _say_windows(trainer.corpus)
    weights = sum(t.n_bytes for t in trainer.model.parts.weights.values())
    row("peak", f"about {size(parts.peak)}, of which")
    for n_bytes, what in (
        (parts.arena, "arena: activations and what the backward pass keeps"),
        (parts.parameters, "parameters, their gradients, moments, and a copy to measure steps by"),
        (parts.weights, f"pages of the largest weight; all {size(weights)} stay in the file"),
        (parts.cache, "cache of the answers before and after"),
        (parts.process, "interpreter, libraries, text, kernels and their compiler"),
    ):
        row("", f"{size(n_bytes):>8}  {what}")
    left = trainer.n_steps - trainer.progress.step  # before two steps are made
    seconds = trainer.rehearse()
    row("time", f"{span(seconds)} a step: {span(seconds * left)} and the validations")
    say()
    row("dry run", "nothing was written; without --dry-run this is done")


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
