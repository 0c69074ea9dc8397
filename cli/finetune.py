"""`pyggml-finetune`: model + text → adapter. What it will do comes first, then it does it."""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click
import numpy as np

from pyggml import load
from pyggml.cli import ahead, demo, overview
from pyggml.cli.interrupt import stopping
from pyggml.cli.options import PATH, SETTINGS, given_settings, settings_options
from pyggml.cli.paths import check_output, check_space
from pyggml.cli.progress import Meter, display, rise
from pyggml.cli.run import STOPPED
from pyggml.cli.samples import check_answer, compare, prompt_ids
from pyggml.cli.show import row, say, size, unescaped
from pyggml.errors import CheckpointError, ConfigError, PyggmlError
from pyggml.lora import (
    Adapter,
    LoraConfig,
    TrainConfig,
    Trainer,
    attach,
    lock,
    read_corpus,
    unfreeze,
)
from pyggml.lora.checkpoint import KEPT, existing, held

LORA_FLAGS = {"rank": "lora_rank", "alpha": "lora_alpha", "modules": "lora_modules"}
_HEADER_BYTES = 64 << 10  # more than the header of an adapter takes


@dataclass(frozen=True, slots=True)
class Job:
    """The command line, understood."""

    model: Path
    data: Path
    output: Path
    init: Path | None
    resume: Path | None
    prompt: str | None
    lora: LoraConfig
    train: TrainConfig


def _finetune(**given: Any) -> int:
    job = _job(given)
    _check_places(job)
    with lock.held(job.output):
        return _run(job, given)


def _run(job: Job, given: dict[str, Any]) -> int:
    model = load(job.model, job.init, job.train.compute)
    overview.say_model(model)
    adapter = attach(model, job.lora) if job.init is None else unfreeze(model)
    model = adapter.model
    overview.say_adapter(model, adapter)
    _check_room(job, adapter.parameters.data.nbytes + _HEADER_BYTES)
    t = job.train
    corpus = read_corpus(job.data, model.tokenizer, t.ctx, t.val_split, t.special_tokens)
    overview.say_data(job.data, corpus, t.val_split)
    prompt = prompt_ids(model, job.prompt and unescaped(job.prompt), corpus)
    trainer = Trainer(model, adapter.parameters, corpus, job.train)
    if job.resume is not None:
        trainer.resume(_checkpoint(job.resume))
    overview.say_memory(trainer.reserve(), job.train.grad_checkpointing)
    overview.say_steps(trainer)
    if job.output.exists():
        row("output", f"{job.output} exists; it is replaced at the end")
    say()
    before = load(job.model, job.init, job.train.compute)  # as it is now: -o may replace it
    start = trainer.progress.step
    finished = _train(job, trainer, adapter, prompt)
    if not finished:
        _say_how_to_resume(trainer, start, given)
        return STOPPED
    compare(before, model, prompt)
    _say_how_to_use(job.model, job.output)
    return 0


def _train(job: Job, trainer: Trainer, adapter: Adapter, prompt: np.ndarray) -> bool:
    """Train and write the adapter; whether that went to the end."""
    start, meter = trainer.progress.step, Meter(trainer.history)
    plan, compute = trainer.passes.training, trainer.model.backend.compute
    with stopping(trainer.stop):
        with (
            ahead.helped(job.model, adapter.config, job.train, plan, compute) as compiled,
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
                faults = [*error.faults, *_rescued(adapter, meter, job.output)]
                raise PyggmlError(faults, error.about) from error
        if finished:
            check_answer(trainer.model, prompt)
        if finished or trainer.progress.step > start:
            _say_result(trainer)
            _save(adapter, meter, job.output)
    return finished


# -- what was asked for -------------------------------------------------------------------------


def _job(given: dict[str, Any]) -> Job:
    if given["init"] is not None:
        _check_init(given)
    if given["demo"]:
        demo.check()
        defaults: dict[str, Any] = {"model": demo.BASE, "data": demo.TEXT, "output": demo.OUTPUT}
        defaults |= {"prompt": demo.PROMPT, **demo.SETTINGS}
        of_file = LORA_FLAGS.values() if given["init"] is not None else ()
        given = given | {
            name: value
            for name, value in defaults.items()
            if given[name] is None and name not in of_file
        }
    flags = {"model": "-m MODEL.gguf", "data": "-f TEXT", "output": "-o ADAPTER.gguf"}
    missing = [flag for name, flag in flags.items() if given[name] is None]
    if missing:
        raise ConfigError(f"wanted {', '.join(missing)}, or --demo, which needs nothing else")
    if given["checkpoint_dir"] is None and given["resume"] is not None and given["resume"].is_dir():
        given = given | {"checkpoint_dir": str(given["resume"])}  # it goes on where it was
    if given["checkpoint_every"] is not None and given["checkpoint_dir"] is None:
        raise ConfigError("--checkpoint-every wants --checkpoint-dir, a folder for checkpoints")
    return Job(
        **{name: given[name] for name in (*flags, "init", "resume", "prompt")},
        lora=LoraConfig(**given_settings(LoraConfig, LORA_FLAGS, given)),
        train=TrainConfig(**given_settings(TrainConfig, {}, given)),
    )


def _check_init(given: dict[str, Any]) -> None:
    """The file settles what the adapter is."""
    settled = [LORA_FLAGS.get(f.name, f.name) for f in fields(LoraConfig) if f.name != "seed"]
    clash = ["--" + name.replace("_", "-") for name in settled if given[name] is not None]
    if clash:
        raise ConfigError(
            f"--init takes rank, alpha and modules from its file: leave out {', '.join(clash)}"
        )


def _check_places(job: Job) -> None:
    """What would fail after hours fails now."""
    check_output(job.output, {"model": job.model, "text": job.data, "checkpoint": job.resume})
    folder = job.train.checkpoint_dir
    if folder is not None and Path(folder).exists():
        if not Path(folder).is_dir():
            raise ConfigError(f"{folder}: is a file, wanted a folder for checkpoints")
        check_output(Path(folder, "step.gguf"), {})
        with held(Path(folder)):  # the run takes it again; a refusal shall come before the work
            pass
    if job.resume is not None and not job.resume.exists():
        raise CheckpointError(f"{job.resume}: does not exist, wanted a checkpoint to resume from")


def _check_room(job: Job, n_adapter: int) -> None:
    check_space(job.output, n_adapter)
    folder = job.train.checkpoint_dir
    if folder is not None:  # the numbers and two moments of each; one more than those that stay
        there = sum(path.stat().st_size for path in existing(Path(folder)))
        check_space(Path(folder), max(0, 3 * n_adapter * (KEPT + 1) - there))


def _checkpoint(path: Path) -> Path:
    """A checkpoint, or the newest one in a folder."""
    if not path.is_dir():
        return path
    found = existing(path)
    if not found:
        raise CheckpointError(f"{path}: holds no checkpoint")
    return found[-1]


# -- what came of it ----------------------------------------------------------------------------


def _say_result(trainer: Trainer) -> None:
    """The whole run, also what came before it was resumed."""
    history = trainer.history
    change = "loss {:.4f} → {:.4f}".format(*history.ends())
    if len(history.validations) > 1:
        first, last = history.validations[0], history.validations[-1]
        change += f", validation {first.loss:.4f} → {last.loss:.4f}"
    say()
    row("result", f"step {trainer.progress.step} of {trainer.n_steps}: {change}")
    if history.has_doubled:
        row("warning", rise(history))


def _save(adapter: Adapter, meter: Meter, path: Path) -> None:
    try:
        adapter.save(path)
    except PyggmlError as error:
        faults = [*error.faults, *_rescued(adapter, meter, path)]
        raise PyggmlError(faults, error.about) from error
    row("adapter", f"{path}, {size(path.stat().st_size)}")


def _rescued(adapter: Adapter, meter: Meter, path: Path) -> list[str]:
    """Save the last step's adapter in a temporary folder, so that an error costs no work; a clause
    that says where, or none if there was no step or no room."""
    if meter.last is None:
        return []
    spare = Path(tempfile.mkdtemp(prefix="pyggml-"), path.name)
    try:
        adapter.save(spare)
    except PyggmlError:
        spare.parent.rmdir()
        return []
    return [f"the adapter of step {meter.last.step} was saved as {spare}"]


def _say_how_to_resume(trainer: Trainer, start: int, given: dict[str, Any]) -> None:
    step, folder = trainer.progress.step, trainer.config.checkpoint_dir
    if step == start:
        row("stopped", "before a step was made; nothing was written")
        return
    row("stopped", f"after step {step} of {trainer.n_steps}; the adapter is of that step")
    if folder is None:
        row("", "without --checkpoint-dir this run cannot be resumed")
        return
    row("resume", shlex.join(_words(given | {"resume": Path(folder)})))


def _words(given: dict[str, Any]) -> list[str]:
    """The command line that gives these parameters."""
    words = ["pyggml-finetune"]
    for option in command.params:
        value = given.get(option.name or "")
        if value is True:
            words.append(option.opts[-1])
        elif value is not None and value is not False:
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            words += [option.opts[0], text]
    return words


def _say_how_to_use(model: Path, adapter: Path) -> None:
    given = shlex.join(["-m", str(model), "--lora", str(adapter)]) + ' -p "..."'
    say()
    row("use it", f"pyggml generate {given}")
    row("", f"llama-cli {given}")


command = click.Command(
    "finetune",
    context_settings=SETTINGS,
    callback=_finetune,
    help="Train a LoRA adapter for a GGUF model; its weights stay as they are, quantised.\n\n"
    "Ctrl-C, SIGTERM or a closed terminal or pipe ends the run after the step under way, and saves "
    "adapter and checkpoint; before the first step nothing is written.",
    params=[
        click.Option(["-m", "--model"], type=PATH, help="GGUF model to adapt"),
        click.Option(
            ["-f", "--file", "data"],
            type=PATH,
            help="UTF-8 text; or rows (JSON Lines, JSON, CSV) with text, or with prompt and "
            "completion, of which the completion is learned",
        ),
        click.Option(
            ["-o", "--output"], type=PATH, help="adapter to write, replaced only at the end"
        ),
        click.Option(["--demo"], is_flag=True, help="a small run that needs no other option"),
        click.Option(
            ["--init"],
            type=PATH,
            help="adapter to train further; rank, alpha and modules are its file's",
        ),
        *settings_options(LoraConfig, LORA_FLAGS, without=["seed"]),
        *settings_options(TrainConfig, {}),
        click.Option(
            ["--resume"],
            type=PATH,
            help="checkpoint, or folder of them, to continue from; a folder gets the next ones too",
        ),
        click.Option(
            ["--prompt"],
            help="answered before and after training; \\n is a new line "
            "(default: a line of the held-out text)",
        ),
    ],
)
