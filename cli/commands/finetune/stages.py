"""The stages of a run: model, adapter, data, graphs, training, adapter file, answers."""

import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from pyggml import gguf, load
from pyggml.cli import compile_ahead
from pyggml.cli.commands.finetune import memory, record, results, summary
from pyggml.cli.commands.finetune.chats import (
    has_chats,
    preview,
    say_chats,
    template_of,
    with_template,
)
from pyggml.cli.commands.finetune.dry_run import say_plan
from pyggml.cli.commands.finetune.job import Job, check_places, check_room, checkpoint_of
from pyggml.cli.commands.finetune.results import Trained
from pyggml.cli.commands.finetune.rows import say_report, say_row_losses, say_rows, say_validation
from pyggml.cli.terminal.exit import STOPPED
from pyggml.cli.terminal.interrupt import stop_on_signals
from pyggml.cli.terminal.places import replacements
from pyggml.cli.terminal.progress import Meter, count_printer, display
from pyggml.cli.terminal.row_losses import RowLoss, row_losses
from pyggml.cli.terminal.samples import Reading, check_answer, compare, prompt_ids, readings
from pyggml.cli.terminal.show import progress_lines, recorded_rows, row, say, unescape
from pyggml.errors import (
    CheckpointError,
    ConfigError,
    DeviceLostError,
    DeviceMemoryError,
    Fault,
    NotFiniteError,
    PyggmlError,
)
from pyggml.kernels.gemm import FASTEST
from pyggml.lora import (
    Corpus,
    TrainConfig,
    TrainedTensors,
    Trainer,
    attach,
    read_corpus,
    train_packed,
    train_scales,
    train_tensors,
    unfreeze,
)
from pyggml.lora.adapter.names import meanings
from pyggml.lora.data.prompts import Prompts
from pyggml.lora.data.report import data_report, language_report
from pyggml.lora.data.unused import OF_TEXTS, unused_by_rows
from pyggml.lora.objectives import USUAL
from pyggml.lora.objectives.objective import WARM_UP, Task
from pyggml.lora.ranks import ALONE, Ranks
from pyggml.lora.ranks.device import device_of_rank
from pyggml.lora.trainer import checkpoint, lock
from pyggml.lora.trainer.arithmetic import stored_compute
from pyggml.lora.trainer.losses import Losses
from pyggml.lora.trainer.passes import Passes
from pyggml.lora.trainer.reports import Callback
from pyggml.lora.trainer.validation import cost_of_run
from pyggml.model import Model

_READ_AGAIN = 0.01  # share of the run's tokens of which the rows have their losses in the report

Watcher = Callable[[Trainer], Callback]


@dataclass(frozen=True, slots=True)
class Around:
    """What a command does around a run.

    resume_command   of a job and a folder of checkpoints: the command line that goes on from there
    save_settings    writes the settings of a job beside its adapter
    watch            what hears the reports too, as a function of the trainer
    measure          makes a table for the report, once training has reached its end
    """

    resume_command: Callable[[Job, Path], str]
    save_settings: Callable[[Job], None]
    watch: Watcher | None = None
    measure: Callable[[], record.ReportTable] | None = None


def run(job: Job, around: Around, ranks: Ranks = ALONE) -> int:
    """Do the job; returns the exit code. Of several ranks the first one alone writes."""
    if ranks.is_first:
        check_places(job)
    writes = ranks.is_first and not (job.dry_run or job.previews_only)
    with lock.hold(job.output) if writes else nullcontext():
        with recorded_rows() as rows, progress_lines():
            prepared = PreparedRun(*_prepare(job, ranks), rows, around)
        return prepared.do()


def _prepare(job: Job, ranks: Ranks) -> tuple[Job, Trainer, Trained, np.ndarray]:
    """All that comes before the first step, printed as it is made. The job is that with the sizes
    that fit into memory."""
    if job.resume is not None:
        job = replace(job, resume=checkpoint_of(job.resume))
    if not job.is_split:
        job = replace(job, device=device_of_rank(job.device, ranks))
    base = _load(job, _compute(job))
    summary.say_model(base)
    job = _with_passes(_within_context(job, base), ranks)
    told = job.reading.chat_template
    job, choice = with_template(job, base.tokenizer)
    trained = _attach(job, base)
    job = _with_rate(job, trained)
    model = trained.model
    summary.say_trained(trained, meanings(base.parts, job.lora.modules or ()))
    check_room(job, trained.parameters, results.n_bytes(trained))
    job, corpus, prompt = _within_memory(job, base, trained, ranks)
    if not has_chats(corpus):
        job = replace(job, reading=replace(job.reading, chat_template=told))
    if faults := unused_by_rows(corpus, job.reading):
        raise ConfigError(faults)
    summary.say_data(corpus, job.reading)
    say_chats(corpus, job.reading, model.tokenizer, choice, job.init)
    say_rows(corpus, model.tokenizer)
    if not job.preview:  # which tells more
        say_report(data_report(corpus, model.tokenizer))
    model.tokenizer.rest()  # what follows decodes at most
    trainer = Trainer(
        model, trained.parameters, corpus, job.train, job.objective, ranks, reference=base
    )
    memory.stream(job, trainer, len(prompt))
    memory.expect_alike(model, ranks)
    _resume(trainer, job)
    summary.say_places(trainer)
    summary.say_memory(trainer.reserve(), job.train)
    summary.say_steps(trainer, job.fixed)
    summary.say_ranks(trainer, job.device, "grad_accum" in job.fixed)
    say_validation(trainer)
    return job, trainer, trained, prompt


def _within_context(job: Job, model: Model) -> Job:
    """With windows as long as the model's context, if that is shorter and the user gave none."""
    ctx = job.reading.ctx
    if "ctx" in job.fixed or ctx <= model.config.n_ctx:
        return job
    row("context", f"windows of {model.config.n_ctx} tokens, all that the model has, not of {ctx}")
    return replace(job, reading=replace(job.reading, ctx=model.config.n_ctx))


def _with_passes(job: Job, ranks: Ranks) -> Job:
    """With a pass of each step for each process, if the user gave no number of passes."""
    c = job.train
    if "grad_accum" in job.fixed or c.step_in_backward or c.grad_accum >= ranks.size:
        return job
    return replace(job, train=replace(c, grad_accum=ranks.size))


def _with_rate(job: Job, trained: Trained) -> Job:
    """With the learning rate that suits what is trained, if the user gave none."""
    rate = trained.rate if isinstance(trained, TrainedTensors) else None
    if rate is None or "lr" in job.fixed:
        return job
    return replace(job, train=replace(job.train, lr=rate))


def _resume(trainer: Trainer, job: Job) -> None:
    """From the job's checkpoint, if it has one. Raises CheckpointError; of another run with what
    can be done instead."""
    try:
        if job.resume is not None:
            trainer.resume(job.resume)
    except CheckpointError as error:
        if not error.about.endswith(checkpoint.ANOTHER_RUN):
            raise
        instead = "--init trains an adapter on otherwise, -m a whole model"
        may = f"length, validation and logging may change; {instead}"
        faults = _without_following(error.faults, job.fixed)
        raise CheckpointError([*faults, may], error.about) from error


def _without_following(faults: Sequence[Fault], given: Collection[str]) -> list[Fault]:
    """The faults without a learning rate and a warm-up that were not given, where the objective or
    what is trained differs: these have such settings of their own."""
    names = {fault[0] for fault in faults if not isinstance(fault, str)}
    if not any(name.startswith("adapter.") or name == "settings.objective" for name in names):
        return [*faults]
    follow = {f"settings.{name}" for name in (*USUAL.defaults, *WARM_UP) if name not in given}
    return [fault for fault in faults if isinstance(fault, str) or fault[0] not in follow]


def _within_memory(
    job: Job, base: Model, trained: Trained, ranks: Ranks
) -> tuple[Job, Corpus, np.ndarray]:
    """The job as its limit of memory settles it, its windows, and the prompt of the answers. The
    model's blocks are where there is memory for them."""
    model, asked = trained.model, job.prompt

    @cache
    def corpus(ctx: int) -> Corpus:
        reading = replace(job.reading, ctx=ctx)
        return read_corpus(job.sources, model.tokenizer, reading, job.cache, job.objective.rows)

    def prompt(ctx: int) -> np.ndarray:
        return prompt_ids(model, asked and unescape(asked), corpus(ctx), job.reading)

    def planner(config: TrainConfig, ctx: int) -> Passes:
        task = Task(model, corpus(ctx), config, base)
        return Losses(job.objective, trained.parameters, task).passes

    job = memory.within(job, trained, len(prompt(job.reading.ctx)), planner)
    memory.place(job, trained, len(prompt(job.reading.ctx)), planner, ranks)
    return job, corpus(job.reading.ctx), prompt(job.reading.ctx)


def _load(job: Job, compute: str) -> Model:
    """The model from which the run starts."""
    files = [*(job.below or ()), *([] if job.init is None else [(job.init, 1.0)])]
    model = load(job.model, files, compute, **job.where)
    model.release = job.max_memory is not None
    return model


def _attach(job: Job, model: Model) -> Trained:
    unread = job.objective.unread(model)
    if job.tensors is not None and (job.qat or job.original):
        with gguf.open(job.original) if job.original else nullcontext() as original:
            return train_packed(model, job.tensors, job.qat, original, unread)
    if job.tensors is not None:
        return train_tensors(model, job.tensors, job.masters == "half", unread)
    if job.trains_scales:
        return train_scales(model, unread)
    if job.init is None:
        decomposed = count_printer(f"{job.lora.init}: matrices decomposed")
        with gguf.open(job.original) if job.original else nullcontext() as original:
            return attach(model, job.lora, on_top=True, original=original, started=decomposed)
    return unfreeze(model, dropout=job.lora.dropout, plus_ratio=job.lora.plus_ratio)


def _compute(job: Job) -> str:
    """The compute type: that of the continued run, else the user's."""
    if job.resume is None or job.train.compute != "auto":
        return job.train.compute
    stored = stored_compute(job.resume)
    if stored not in (None, FASTEST):
        row("compute", f"{stored}, as the run that is continued; auto is {FASTEST} here")
    return stored or "auto"


def _reload(job: Job, below: Sequence[Any], model: Model) -> Model:
    """The model that was written, with the adapters that it was trained below: they are of the base
    that it was, which needs no warning here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*was trained on another model", RuntimeWarning)
        after = load(job.output, below, model.compute, **job.where)
    after.release = model.release
    return after


def _with_rest(error: PyggmlError, left: Sequence[str], trainer: Trainer) -> PyggmlError:
    """The error that ended a run, with what is left of the run."""
    advice = [results.SMALLER] if isinstance(error, DeviceMemoryError) else []
    stands = results.newest_checkpoint(trainer) if isinstance(error, NotFiniteError) else []
    return PyggmlError([*error.faults, *advice, *left, *stands], error.about)


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A job that is prepared: all that comes before its first step is done, and was told.

    prompt   of the answers before and after, ids
    rows     what was told
    """

    job: Job
    trainer: Trainer
    trained: Trained
    prompt: np.ndarray
    rows: record.Rows
    around: Around

    def do(self) -> int:
        """Whatever the job asks for: samples, a plan, or training. The exit code."""
        job, trainer, n_prompt = self.job, self.trainer, len(self.prompt)
        if job.preview:
            self._preview()
        if job.previews_only:
            return 0
        if job.dry_run:
            plan = memory.parts(trainer, n_prompt, job), memory.on_devices(trainer, n_prompt)
            with self._compile_helper() as note_step:
                say_plan(trainer, *plan)
                note_step()
            return 0
        if not trainer.ranks.is_first:  # it tells and writes nothing
            with stop_on_signals(trainer.stop, note=b""):
                return 0 if trainer.run(progress=False) else STOPPED
        watchers = [self.around.watch(trainer)] if self.around.watch else []
        return self._finish(watchers)

    def _preview(self) -> None:
        """Print the report on the rows, those with the highest and lowest loss, and samples."""
        corpus, model = self.trainer.corpus, self.trainer.model
        say()
        say_report(data_report(corpus, model.tokenizer), language_report(corpus, model.tokenizer))
        if self.job.objective.rows == "training":
            say_row_losses(row_losses([model], corpus))
        if isinstance(corpus.train, Prompts):  # of which nothing is learned
            none = np.zeros(corpus.train.tokens.shape, np.bool_)
            corpus = replace(corpus, train=replace(corpus.train, trained=none))
        preview(corpus, model.tokenizer, self.job.preview or 0)

    def _finish(self, watchers: Sequence[Callback]) -> int:
        """Train, and write and print what comes of it; the exit code."""
        job, trainer, model = self.job, self.trainer, self.trained.model
        with progress_lines():
            if said := replacements(job.outputs):
                row("output", said)
            say()
        start = trainer.progress.step
        finished = self._train(watchers)
        if finished or trainer.progress.step > start:
            self.around.save_settings(job)
        if not finished:
            if trainer.progress.step > start:
                record.save_report(job, self.rows)
            results.say_how_to_resume(trainer, start, partial(self.around.resume_command, job))
            return STOPPED
        written = results.is_model(self.trained)
        after = _reload(job, [*(job.below or ())], model) if written else model
        if self.around.measure is not None:
            record.save_table(job, trainer, self.around.measure())
        try:
            self._show_answers(after)
        except NotFiniteError as error:  # the losses of the run were finite, so its result stands
            record.save_report(job, self.rows)
            faults = [*error.faults, f"{job.output} was written"]
            raise NotFiniteError(faults, error.about) from error
        template = template_of(job.reading, model.tokenizer) if has_chats(trainer.corpus) else None
        results.say_how_to_use(job, written, template, model.tokenizer)
        return 0

    def _train(self, watchers: Sequence[Callback]) -> bool:
        """Train and write the result; returns whether training reached its end."""
        job, trainer, trained = self.job, self.trainer, self.trained
        start, meter = trainer.progress.step, Meter.of(trainer)
        with stop_on_signals(trainer.stop):
            with (
                self._compile_helper() as step_done,
                display(meter, trainer.n_steps, start) as show_report,
                record.recorder(job, trainer, self.rows) as record_report,
            ):

                def report(event: Any) -> None:
                    meter.add(event)
                    show_report(event)
                    record_report(event)
                    record.answer_on_the_way(job, event, trainer.model, self.prompt, record_report)
                    if meter.last is not None:
                        step_done()

                try:
                    finished = trainer.run(report, *watchers, progress=False)
                except DeviceLostError as error:  # and the newest numbers with it
                    raise _with_rest(error, results.checkpoint_hint(trainer), trainer) from error
                except PyggmlError as error:
                    left = results.rescue(trained, trainer, meter, job.output)
                    raise _with_rest(error, left, trainer) from error
            trainer.free()
            trained.parameters.end()
            results.check_numbers(trained)
            if finished or trainer.progress.step > start:
                results.say_result(trainer)
                results.save(trained, trainer, meter, job.output)
                record.say_faults(record_report)
        return finished

    def _show_answers(self, after: Model) -> None:
        """What the result says, beside what was said before, printed and in the report; there with
        a held-out text as both models read it, and the losses of some rows.

        Raises NotFiniteError where it makes no numbers.
        """
        job, trainer, prompt, rows = self.job, self.trainer, self.prompt, self.rows
        before, corpus = trainer.reference, trainer.corpus
        assert before is not None
        if after is not trainer.model:
            results.say_loss_of_file(trainer, after)
        if job.objective.rows in OF_TEXTS:
            record.save_report(job, rows)
            return
        with progress_lines():
            check_answer(after, prompt)
            answers = compare(before, after, prompt)
        read, losses = list[Reading](), list[RowLoss]()
        if job.objective.rows == "training" and job.report is not False:
            most = _READ_AGAIN * cost_of_run(corpus.train, job.train)[0]
            read = readings(before, after, corpus)
            losses = row_losses([before, after], corpus, most)
        question = after.tokenizer.decode(prompt)
        record.save_answers(job, trainer, question, answers, losses)
        record.save_report(job, rows, question, answers, read)

    def _compile_helper(self) -> AbstractContextManager[Callable[[], None]]:
        """A second process that compiles for the CPU, unless memory is limited: it takes 300 MB of
        its own."""
        job, trainer = self.job, self.trainer
        if trainer.model.devices.have_copies:
            return nullcontext(lambda: None)
        graph, compute = trainer.passes.training.graph, trainer.model.backend.compute
        lora = results.lora_of(self.trained) if job.max_memory is None else None
        return compile_ahead.run_helper(job.model, lora, job.train, job.reading.ctx, graph, compute)
