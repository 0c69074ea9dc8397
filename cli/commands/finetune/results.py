"""The end of a run: what it prints and saves."""

import json
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pyggml.chat import MODEL, ChatTemplate, template_file, write_alike
from pyggml.cli.commands.finetune.job import Job
from pyggml.cli.terminal.chat_templates import choose_template, own_template
from pyggml.cli.terminal.hints import program
from pyggml.cli.terminal.lines import confusion_lines, say_lines
from pyggml.cli.terminal.options import adapter_word
from pyggml.cli.terminal.progress import Meter, change, rise
from pyggml.cli.terminal.rewriting import say_losses
from pyggml.cli.terminal.show import is_quiet, row, say, with_size
from pyggml.errors import NotFiniteError, PyggmlError, QuantError, first_names
from pyggml.lora import Adapter, LoraConfig, TrainedTensors, Trainer, merge
from pyggml.lora.data.labels import Labels
from pyggml.lora.data.unused import OF_TEXTS
from pyggml.lora.objectives import ClassCounts
from pyggml.lora.objectives.objective import Task
from pyggml.lora.trainer.folder import existing, newest
from pyggml.lora.trainer.losses import validation_loss
from pyggml.model import Model
from pyggml.models.stack import LABELS
from pyggml.requantize import PackingLosses
from pyggml.tokenizer import Tokenizer

# -- what was trained: an adapter, or tensors of the model --------------------------------------

Trained = Adapter | TrainedTensors
Metadata = Mapping[str, str | None]  # what the output says of chats, see pyggml.chat.source


def is_model(trained: Trained) -> bool:
    """Whether the output is a whole model: no adapter file can hold what was trained."""
    return not (isinstance(trained, Adapter) and trained.fits_a_file)


def n_bytes(trained: Trained) -> int:
    """The approximate size of the output."""
    if is_model(trained):
        return trained.model.file.n_bytes
    p = trained.parameters
    return p.data.nbytes + p.constant_data.nbytes


def lora_of(trained: Trained) -> LoraConfig | None:
    return trained.config if isinstance(trained, Adapter) else None


def _word(trained: Trained) -> str:
    return "model" if is_model(trained) else "adapter"


def _write(trained: Trained, path: Path, metadata: Metadata) -> PackingLosses | None:
    """What packing lost, of a model."""
    if isinstance(trained, Adapter) and not trained.fits_a_file:
        return merge(trained.model, path, metadata=metadata)
    return trained.save(path, metadata)


# -- at the end ---------------------------------------------------------------------------------


def say_result(trainer: Trainer) -> None:
    """Print the result of the whole run, with the part before it was resumed."""
    history = trainer.history
    said = f"loss {change(history)}"
    if len(history.validations) > 1:
        first, last = history.validations[0], history.validations[-1]
        said += f", validation {first.loss:.4f} → {last.loss:.4f}"
    say()
    row("result", f"step {trainer.progress.step} of {trainer.n_steps}: {said}")
    _say_classes(trainer)
    _say_best(trainer)
    if history.has_doubled:
        row("warning", rise(history))


def _say_classes(trainer: Trainer) -> None:
    """What the held-out texts of each class were taken for, by the last validation."""
    last = trainer.history.validations[-1:]
    if last and isinstance(last[0].tally, ClassCounts):
        names = Labels.read(trainer.corpus.about[LABELS]).names
        say()
        say_lines(confusion_lines(last[0].tally.confusion, names))
        say()


def _say_best(trainer: Trainer) -> None:
    """The best validation, where the output is not of the last step or could be of another, and why
    a run ended early."""
    history, config = trainer.history, trainer.config
    best, step = history.best, trainer.output_step
    if config.keep_best and best is not None and best.step != trainer.progress.step:
        of = f"the output is of that step, not of step {trainer.progress.step}"
        if best.step != step:
            of = f"no step was validated after it, so the output is of the last, step {step}"
        row("best", f"validation {best.loss:.4f} at step {best.step}; {of}")
    elif best is not None and best is not history.validations[-1]:
        row("best", f"validation {best.loss:.4f} at step {best.step}; --keep-best would write it")
    if step == 0 < trainer.progress.step:
        row(
            "warning",
            "no validation was better than before the first step, so --keep-best writes what was "
            "not trained; a lower --lr may learn",
        )
    if trainer.progress.step < trainer.n_steps and history.has_stalled(config.patience):
        row("ended", f"early: {config.patience} validations were no better")


SMALLER = "smaller are --batch, --ctx and --grad-checkpointing"  # of what a run needs


def check_numbers(trained: Trained) -> None:
    """NotFiniteError if what was trained holds numbers that are none: the last update may be what
    broke it, which no later step finds out."""
    p = trained.parameters
    if broken := p.not_finite():
        where = f" in {first_names(broken, 3)}" if p.has_halves else ""
        raise NotFiniteError(
            [
                f"after training the {_word(trained)} holds numbers that are none{where}",
                ("lr", "may be too high"),
                f"the {_word(trained)} was not written",
            ]
        )


def save(trained: Trained, trainer: Trainer, meter: Meter, path: Path) -> None:
    """Write the result. If the disk refuses, the error says where else it was saved."""
    try:
        losses = _write(trained, path, trainer.parameters.metadata)
    except PyggmlError as error:
        faults = [*error.faults, *rescue(trained, trainer, meter, path)]
        raise PyggmlError(faults, error.about) from error
    row(_word(trained), with_size(path))
    if losses is not None:
        say_losses(losses)


def say_loss_of_file(trainer: Trainer, written: Model) -> None:
    """The validation loss of the very model that was written, beside that of the trained one."""
    sample, history = trainer.validation, trainer.history
    if sample is None or not history.validations:
        return
    trained = next(v for v in history.validations if v.step == trainer.output_step)
    task = Task(written, trainer.corpus, trainer.config, trainer.reference)
    file = validation_loss(sample, trainer.objective, task)
    row("file", f"validation loss {file:.4f}, {trained.loss:.4f} before it was packed")


def rescue(trained: Trained, trainer: Trainer, meter: Meter, path: Path) -> list[str]:
    """Save the result in a temporary folder, so that an error costs no work; with `--keep-best` the
    best so far.

    Numbers that halves do not hold are saved as F32.

    Returns a clause that says where, or why not; an empty list if no step was made.
    """
    if meter.last is None:
        return []
    trainer.take_best()
    lost = f"the {_word(trained)} was not saved"
    if trainer.is_between_steps:
        return [f"{lost}: half of the step had changed it"]
    if trained.parameters.not_finite():
        return [f"{lost}: it holds numbers that are none"]
    spare, kind = Path(tempfile.mkdtemp(prefix="pyggml-"), path.name), ""
    try:
        try:
            _write(trained, spare, trainer.parameters.metadata)
        except QuantError:
            if not isinstance(trained, TrainedTensors):
                raise
            _write(replace(trained, file_type="F32"), spare, trainer.parameters.metadata)
            kind = ", its tensors in F32"
    except PyggmlError as error:
        spare.parent.rmdir()
        return [f"{lost} elsewhere: {error}"]
    return [f"the {_word(trained)} of step {trainer.output_step} was saved as {spare}{kind}"]


def newest_checkpoint(trainer: Trainer) -> list[str]:
    """What stands of a run whose numbers are none: a clause; an empty list without a checkpoint."""
    folder = trainer.config.checkpoint_dir
    if folder is None or not existing(Path(folder)):
        return []
    file = newest(Path(folder))
    step = int(file.stem.removeprefix("step-"))
    return [f"--resume {file} --max-steps {step} writes the newest checkpoint"]


def checkpoint_hint(trainer: Trainer) -> list[str]:
    """What is left of a run whose device was lost: a clause."""
    folder = trainer.config.checkpoint_dir
    if folder is None or not existing(Path(folder)):
        return ["no checkpoint was kept"]
    return [f"--resume {folder} goes on from {newest(Path(folder)).name}"]


def say_how_to_resume(trainer: Trainer, start: int, resume_command: Callable[[Path], str]) -> None:
    step, folder = trainer.progress.step, trainer.config.checkpoint_dir
    if step == start:
        row("stopped", "before a step was made; adapter and checkpoints are as they were")
        return
    of = "that step"
    if trainer.output_step != step:
        of = f"step {trainer.output_step}, which validated best"
    row("stopped", f"after step {step} of {trainer.n_steps}; the output is of {of}")
    if folder is None:
        row("", "without --checkpoint-dir this run cannot be resumed")
        return
    row("resume", resume_command(Path(folder)))


def say_how_to_use(
    job: Job, is_model: bool, template: ChatTemplate | None, tokenizer: Tokenizer
) -> None:
    """Commands that read what was measured: the output, on the adapters below it.

    template: that of the chats that were learned; None: text was
    """
    if is_quiet():
        return
    say()
    model = ("-m", str(job.output if is_model else job.model))
    adapters = [*(job.below or ()), *([] if is_model else [(job.output, 1.0)])]
    ours = shlex.join([*model, *(w for given in adapters for w in ("--lora", adapter_word(given)))])
    theirs = shlex.join([*model, *(w for given in adapters for w in _llama_cpp(*given))])
    if job.objective.rows in OF_TEXTS:
        row("use it", f"{shlex.join(program('eval'))} {ours} -f ROWS.jsonl")
        return
    if template is None:
        row("use it", f'{shlex.join(program("generate"))} {ours} -p "..."')
        row("use it", f'llama-cli {theirs} -p "..."')
        return
    template_words = ""
    if is_model and choose_template(tokenizer, adapters, None).by:
        template_words = f" --chat-template {MODEL}"
    served = shlex.join([*model, *_serve(job, adapters)])
    row("use it", f"{shlex.join(program('chat'))} {ours}{template_words}")
    row("use it", f"{shlex.join(program('serve'))} {served}{template_words} --web")
    own = own_template(tokenizer)
    is_own = own and (own.source == template.source or write_alike(template, own))
    said, needs_file = _for_llama_cpp(job, is_model or bool(is_own), template)
    row("use it", f"llama-cli {theirs} -cnv --jinja{said}")
    if needs_file:
        shown = shlex.join([*program("inspect"), str(job.output), "--template", "--raw"])
        row("", f"{shown} > TEMPLATE.jinja  writes that file")


def _serve(job: Job, adapters: Sequence[tuple[Path, float]]) -> list[str]:
    """Adapters as `pyggml serve` adds them up: under one name."""
    if len(adapters) < 2:
        return [word for given in adapters for word in ("--lora", adapter_word(given))]
    name = job.output.stem
    return [word for given in adapters for word in ("--lora", f"{name}={adapter_word(given)}")]


def _for_llama_cpp(job: Job, carried: bool, template: ChatTemplate) -> tuple[str, bool]:
    """What llama.cpp must be told of a template: it reads the model's own, and no inputs of it.
    And whether the user has to write it to a file. carried: the model's file has it"""
    words = list[str]()
    file = template_file(job.reading.chat_template)
    if not carried:
        words = ["--chat-template-file", str(file or "TEMPLATE.jinja")]
    if template.names:
        words += ["--chat-template-kwargs", json.dumps(template.names, ensure_ascii=False)]
    return (f" {shlex.join(words)}" if words else ""), not carried and file is None


def _llama_cpp(path: Path, weight: float) -> tuple[str, str]:
    """An adapter as llama.cpp takes it."""
    return ("--lora", str(path)) if weight == 1 else ("--lora-scaled", f"{path}:{weight:g}")
