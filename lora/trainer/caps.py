"""Settings of a run that another setting, the data or the machine caps: what is done instead.

max_steps      epochs end before                       epochs      max_steps end before
batch          an epoch has fewer windows              threads     the machine has fewer cores
warmup_steps   at most half of all steps               lr_cycles   a cycle has at least one step
val_every, checkpoint_every                            the run has fewer steps
val_windows    fewer are held out                      patience    too few validations are made
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING

from pyggml import threads

if TYPE_CHECKING:
    from pyggml.lora.trainer.plan import RunPlan

Cap = tuple[str, str]  # a setting, and the rest of a sentence


def caps(plan: RunPlan) -> Iterator[Cap]:
    """The settings of a run that do less than they say, those too that have their defaults."""
    yield from _of_length(plan)
    yield from _of_steps(plan)
    yield from _of_validations(plan)
    c, most = plan.config, threads.most()
    if c.threads > most:
        yield "threads", f"is {c.threads}: {most} are used, all that this process has"


def _of_length(plan: RunPlan) -> Iterator[Cap]:
    c, n = plan.config, plan.n_steps
    of_epochs = (c.epochs or 0) * plan.order.n_of_epoch
    if c.max_steps and of_epochs:
        if c.max_steps > of_epochs:
            clause = f"the run ends with step {n}, as epochs is {c.epochs}"
            yield "max_steps", f"is {c.max_steps}: {clause}"
        elif c.max_steps < of_epochs:
            clause = f"the run ends with step {n} of {of_epochs}, as max_steps is {c.max_steps}"
            yield "epochs", f"is {c.epochs}: {clause}"


def _of_steps(plan: RunPlan) -> Iterator[Cap]:
    c, n, rate = plan.config, plan.n_steps, plan.learning_rate
    n_read = plan.corpus.train.n_read
    if n_read < c.windows_per_step:
        clause = f"a step has the {n_read} of an epoch, not {c.windows_per_step}"
        yield "batch" if n_read < c.batch else "grad_accum", f"wants more windows: {clause}"
    if rate.n_warmup < rate.n_warmup_set:
        yield "warmup_steps", f"is {rate.n_warmup_set}: it takes {rate.n_warmup}, half of all steps"
    if c.lr_cycles > n - rate.n_warmup:
        yield "lr_cycles", f"is {c.lr_cycles}: there are {n - rate.n_warmup} steps for them"
    if c.checkpoint_dir is not None and c.checkpoint_every > n:
        clause = f"the run ends with step {n}, so its end alone has a checkpoint"
        yield "checkpoint_every", f"is {c.checkpoint_every}: {clause}"


def _of_validations(plan: RunPlan) -> Iterator[Cap]:
    c, n, sample = plan.config, plan.n_steps, plan.validation
    if sample is None:
        return
    if c.val_every >= n:
        yield "val_every", f"is {c.val_every}: the run ends with step {n}, without one on the way"
    if c.val_windows > sample.n_held_out:
        yield "val_windows", f"is {c.val_windows}: all of the {sample.n_held_out} held out are read"
    n_after = ceil(n / c.val_every) if c.val_every else 1  # after the first step
    if c.patience >= n_after and c.patience:
        clause = f"{n_after} after the first, which is too few to end the run early"
        yield "patience", f"is {c.patience}: {clause}"
