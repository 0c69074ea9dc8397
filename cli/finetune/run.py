"""The stages of a run: model, adapter, data, graphs, training, adapter file, answers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pyggml import load
from pyggml.cli import ahead, overview
from pyggml.cli.finetune import memory, results
from pyggml.cli.finetune.job import Job, check_places, check_room, checkpoint_of
from pyggml.cli.finetune.plan import say_plan
from pyggml.cli.interrupt import stopping
from pyggml.cli.progress import Meter, display
from pyggml.cli.run import STOPPED
from pyggml.cli.samples import check_answer, compare, prompt_ids
from pyggml.cli.show import row, say, unescaped
from pyggml.errors import PyggmlError
from pyggml.gemm import FASTEST
from pyggml.lora import Adapter, Trainer, attach, lock, read_corpus, unfreeze
from pyggml.lora.computed import stored_compute

Resumed = Callable[[Job, Path], str]  # the command line that goes on from a folder of checkpoints


def run(job: Job, resumed: Resumed, save_settings: Callable[[Job], None]) -> int:
    """Do the job; the exit code. `save_settings` writes a job's settings beside its adapter."""
    check_places(job)
    with nullcontext() if job.dry_run else lock.held(job.output):
        job, trainer, adapter, prompt = _prepared(job)
        if job.dry_run:
            say_plan(trainer, memory.parts(trainer, len(prompt)))
            return 0
        return _run(job, trainer, adapter, prompt, resumed, save_settings)


def _prepared(job: Job) -> tuple[Job, Trainer, Adapter, np.ndarray]:
    """All that comes before the first step, said as it is made; the job as memory settles it."""
    model = load(job.model, job.init, _compute(job))
    overview.say_model(model)
    adapter = attach(model, job.lora) if job.init is None else unfreeze(model)
    model = adapter.model
    overview.say_adapter(model, adapter)
    check_room(job, adapter.parameters.data.nbytes)
    asked, corpus = job, read_corpus(job.data, model.tokenizer, job.reading)
    prompt = prompt_ids(model, job.prompt and unescaped(job.prompt), corpus)
    job = memory.within(job, adapter, len(prompt))
    if job.reading != asked.reading:
        corpus = read_corpus(job.data, model.tokenizer, job.reading)
        prompt = prompt_ids(model, job.prompt and unescaped(job.prompt), corpus)
    overview.say_data(job.data, corpus, job.reading.val_split)
    trainer = Trainer(model, adapter.parameters, corpus, job.train)
    if job.resume is not None:
        trainer.resume(checkpoint_of(job.resume))
    overview.say_memory(trainer.reserve(), job.train.grad_checkpointing)
    overview.say_steps(trainer)
    if job.output.exists():
        row("output", f"{job.output} exists; it is replaced at the end")
    return job, trainer, adapter, prompt


def _run(
    job: Job,
    trainer: Trainer,
    adapter: Adapter,
    prompt: np.ndarray,
    resumed: Resumed,
    save_settings: Callable[[Job], None],
) -> int:
    say()
    model = adapter.model
    before = load(job.model, job.init, model.compute)  # as it is now: -o may replace it
    for each in (before, model):
        each.release = job.max_memory is not None
    start = trainer.progress.step
    finished = _train(job, trainer, adapter, prompt)
    if finished or trainer.progress.step > start:
        save_settings(job)
    if not finished:
        results.say_how_to_resume(trainer, start, partial(resumed, job))
        return STOPPED
    compare(before, model, prompt)
    results.say_how_to_use(job.model, job.output)
    return 0


def _compute(job: Job) -> str:
    """How products are computed: as the run did that is continued, or as the user says."""
    if job.resume is None or job.train.compute != "auto":
        return job.train.compute
    found = stored_compute(checkpoint_of(job.resume))
    if found not in (None, FASTEST):
        row("compute", f"{found}, as the run that is continued; auto is {FASTEST} here")
    return found or "auto"


def _train(job: Job, trainer: Trainer, adapter: Adapter, prompt: np.ndarray) -> bool:
    """Train and write the adapter; whether that went to the end."""
    start, meter = trainer.progress.step, Meter(trainer.history)
    with stopping(trainer.stop):
        with (
            _helped(job, trainer, adapter) as compiled,
            display(meter, trainer.n_steps, start) as shown,
        ):

            def report(event: Any) -> None:
                meter.add(event)
                shown(event)
                if meter.last is not None:
                    compiled()

            try:
                finished = trainer.run(report)
            except PyggmlError as error:
                faults = [*error.faults, *results.rescued(adapter, meter, job.output)]
                raise PyggmlError(faults, error.about) from error
        trainer.free()
        if finished:
            check_answer(trainer.model, prompt)
        if finished or trainer.progress.step > start:
            results.say_result(trainer)
            results.save(adapter, meter, job.output)
    return finished


def _helped(
    job: Job, trainer: Trainer, adapter: Adapter
) -> AbstractContextManager[Callable[[], None]]:
    """A second process that compiles, unless memory is limited: it has 300 MB of its own."""
    if job.max_memory is not None:
        return nullcontext(lambda: None)
    graph, compute = trainer.passes.training.graph, trainer.model.backend.compute
    return ahead.helped(job.model, adapter.config, job.train, job.reading.ctx, graph, compute)
