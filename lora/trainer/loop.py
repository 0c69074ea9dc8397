"""The training loop.

per step     the gradient, as the sum of its batches'; clip; the optimiser's step
at times     validation, checkpoint; both between two steps, where a run may also stop

Of several ranks each makes some batches of a step, and all the same optimiser's step.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import cached_property
from math import ceil, isfinite
from pathlib import Path
from time import perf_counter
from typing import Any
from warnings import warn

import numpy as np

import pyggml
from pyggml import heap, threads
from pyggml.backends.cpu import write
from pyggml.errors import (
    CheckpointError,
    ConfigError,
    Fault,
    PyggmlError,
    TokenizerError,
    first_names,
)
from pyggml.gguf.fields import brief
from pyggml.gguf.identity import identity
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.config import DataConfig, LoraConfig, TrainConfig
from pyggml.lora.data import Batch, Corpus, Dataset
from pyggml.lora.data.chats import chat_metadata
from pyggml.lora.objectives import USUAL, Objective
from pyggml.lora.objectives.choice import usual
from pyggml.lora.objectives.objective import Windows
from pyggml.lora.optim import OPTIMISERS, Optimiser, n_kept
from pyggml.lora.ranks import ALONE, Ranks
from pyggml.lora.trainer import checkpoint
from pyggml.lora.trainer.arithmetic import Arithmetic
from pyggml.lora.trainer.checkpoint import Progress
from pyggml.lora.trainer.checks import check_alike, check_settings
from pyggml.lora.trainer.gradient import StepGradient, n_sums
from pyggml.lora.trainer.learning_rate import (
    OwnLearningRate,
    ScheduleFunction,
    learning_rate_of,
)
from pyggml.lora.trainer.losses import Losses
from pyggml.lora.trainer.memory import OnDevice, on_devices
from pyggml.lora.trainer.passes import Passes
from pyggml.lora.trainer.reports import (
    Callback,
    CheckpointReport,
    History,
    Report,
    StepReport,
    ValidationReport,
)
from pyggml.lora.trainer.validation import ValidationSample, margin
from pyggml.model import Model

_PIECE = 1 << 20  # numbers that are copied at a time
# What held in runs that are older than a setting, or that were not given it.
_TRAIN = {**USUAL.settle(TrainConfig()).shared_by_runs(), "warmup_ratio": 0.0}
_USUAL = {
    "adapter": LoraConfig().shared_by_runs(),
    "settings": {**DataConfig().shared_by_runs(), **_TRAIN, **usual()},
}


# The number of a step; what makes memory for so many float32, which lasts until the next pass.
BeforeUpdate = Callable[[int, Callable[[int], np.ndarray]], None]
_FREE = {
    f.name for kind in (DataConfig, TrainConfig) for f in fields(kind) if f.metadata["may_change"]
}


@dataclass(frozen=True, slots=True)
class RunMemory:
    """Bytes that a run takes: its arena, its parameters and the mapped weights.

    The arena is that of its graphs. The parameters include gradients and moments.
    """

    arena: int
    parameters: int
    weights: int


class Trainer:
    """A run: a model, what of it is trained, on what, and how.

    parameters   leaves of the graphs that `model` builds: an adapter's, or the model's own weights
    objective    what is minimised; to write the text, unless it is given
    reference    the fixed model that answers are compared with, by objectives that do so: the base,
                 or the base with the adapter from which training starts
    schedule     the learning rate as a function of the step, the number of steps and the history
                 of losses, instead of the settings' schedule: lambda step, n_steps, history: …

    before_update: called with the number of a step before it changes the parameters, and with
    `Passes.idle_memory`; None, or a function that a recorder sets.

    Memory is taken by `run`, not before. Every one of several ranks has a Trainer and calls it
    alike; the first one alone writes checkpoints.
    Raises ConfigError if the settings do not fit the model, DataError for tokens that it lacks.
    """

    def __init__(
        self,
        model: Model,
        parameters: Parameters,
        corpus: Corpus,
        config: TrainConfig,
        objective: Objective | None = None,
        ranks: Ranks = ALONE,
        reference: Model | None = None,
        schedule: ScheduleFunction | None = None,
    ) -> None:
        self.objective, self.reference = objective or USUAL(), reference
        given, config = config, self.objective.settle(config)
        check_settings(model, corpus, config, ranks)
        self.model, self.parameters, self.corpus, self.config = model, parameters, corpus, config
        self.ranks, self.progress, self.history = ranks, Progress(), History()
        parameters.metadata = chat_metadata(corpus, model) or parameters.metadata
        self._n_read = config.n_read(corpus.train.n_read)
        self.n_steps = int(config.shortest(ceil(self._n_read / config.windows_per_step), 1))
        self.learning_rate = learning_rate_of(
            given if schedule else config, self.n_steps, schedule, lambda: self.history
        )
        self._losses: Losses | None = None
        self._gradient: StepGradient | None = None
        self._optimiser: Optimiser | None = None
        self._best = np.zeros_like(parameters.data) if config.keep_best else None
        self._has_best = False  # whether the parameters are the best, and the last are in _best
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))
        self.before_update: BeforeUpdate | None = None
        self._stopping = False
        self._updating = False
        self._saved = -1  # step of the newest checkpoint

    def reserve(self) -> RunMemory:
        """Build and plan the graphs; returns the bytes that a run will take. Takes none yet."""
        weights = sum(t.n_bytes for t in self.model.parts.weights.values())
        taken = self.parameters.n_bytes(self._n_buffers)
        return RunMemory(self.passes.n_bytes, taken, weights)

    def on_devices(self, cache: int = 0) -> list[OnDevice]:
        """The memory that a run takes of each device but the host. cache: bytes of a session's."""
        return on_devices(self.passes, self.parameters, self._n_buffers, cache)

    @property
    def _n_buffers(self) -> int:
        """Buffers as long as the parameters that a run takes beside them and their gradient."""
        return n_kept(self.config) + n_sums(self.config, self.ranks)

    @property
    def passes(self) -> Passes:
        """The graphs of the run, planned."""
        return self.losses.passes

    @property
    def losses(self) -> Losses:
        """The objective, with the graphs of this run."""
        if self._losses is None:
            self._losses = Losses(
                *(self.objective, self.model, self.parameters, self.corpus, self.config),
                reference=self.reference,
            )
        return self._losses

    @cached_property
    def validation(self) -> ValidationSample | None:
        """What each validation reads; None if nothing is held out."""
        return ValidationSample.of(self.corpus, self.config)

    @property
    def n_threads(self) -> int:
        """Threads to use: those asked for, or this rank's part of all."""
        every = max(threads.most() // self.ranks.n_beside, 1)
        return min(self.config.threads or every, threads.most())

    @property
    def n_first(self) -> int:
        """Steps whose time tells nothing: one may compile, on a device another captures."""
        return 1 + any(not b.is_host for b in self.model.devices.backends)

    def rehearse(self) -> float:
        """Seconds of a step after the first ones, of windows as long as the mean.

        Meant for a dry run: the parameters have changed afterwards, and nothing is on the disk.
        """
        self._begin()
        for _ in range(self.n_first):
            self._step()
        train, windows = self.corpus.train, self._windows()
        share = train.n_computed() / len(train) * len(windows) / train.n_computed(windows)
        return self._step().seconds * share

    def free(self) -> None:
        """Free the graphs and their arenas; later steps make them again."""
        self._losses = None
        heap.give_back()  # the tensors of a graph hold each other

    def save(self) -> Path:
        """Write a checkpoint of the last whole step now; its path. For callbacks.

        Raises ConfigError if `checkpoint_dir` names no folder.
        """
        if self.config.checkpoint_dir is None:
            raise ConfigError([("checkpoint_dir", "is None, wanted a folder for checkpoints")])
        step, folder = self.progress.step, Path(self.config.checkpoint_dir)
        self._saved = step
        if self.ranks.is_first:
            self._write()
            checkpoint.prune(folder, step, self.config.checkpoint_keep, self._is_ours)
        return checkpoint.path_of(folder, step)

    def stop(self) -> None:
        """End the run after the step under way; for signal handlers and other threads."""
        self._stopping = True
        if self.ranks.size > 1:
            self._rescue()

    @property
    def is_done(self) -> bool:
        """Whether all steps are made, or validations say that more would not help."""
        return self.progress.step >= self.n_steps or self.history.has_stalled(self.config.patience)

    def run(self, *callbacks: Callback, progress: bool = True) -> bool:
        """Train to the end; True if it was reached, False if `stop` or Ctrl-C ended it early.

        callbacks  each is called with every report, between two steps: it may call `stop`, `save`,
                   and the adapter's `save`
        progress   whether the run is shown: as a bar on a terminal and in a notebook, else as lines

        The parameters are then those after the last whole step, and a checkpoint of them exists if
        the settings ask for one and a step was made; with `keep_best`, `take_best` follows.

        Raises PyggmlError, naming the step, if loss or gradient is not finite, or if another rank
        fails, and CheckpointError if the folder for checkpoints is another run's.
        """
        start, folder = self.progress.step, self.config.checkpoint_dir
        run = {**self._identity, checkpoint.LENGTH: self.n_steps}
        check_alike(self.ranks, run, Arithmetic.by(self.model))
        if self._has_best:
            self._exchange()
        with ExitStack() as stack:
            with self.ranks.together():
                if folder is not None and self.ranks.is_first:
                    stack.enter_context(checkpoint.hold(Path(folder)))
            report = self._heard_by(callbacks, progress, stack)
            self._begin()
            with self.model.devices.holding(*self.parameters.buffers.values()):
                try:
                    if not self._is_validated and (start == 0 or self.is_done):
                        self._validate(report)
                    while not self.is_done and not self.ranks.any(self._stopping):
                        with self.ranks.together():
                            report(self._step())
                            self._after_step(report)
                except KeyboardInterrupt:
                    if self._updating:  # the parameters may be half of one step, half of the next
                        raise
            if self.progress.step > start:
                self._save(report)
            self.take_best()
            return self.is_done

    def _heard_by(
        self, callbacks: Sequence[Callback], progress: bool, stack: ExitStack
    ) -> Callback:
        """One callback for all, with the display first, which the stack closes."""
        shown = [pyggml.show_run(self)] if progress and self.ranks.is_first else []
        heard = [*map(stack.enter_context, shown), *callbacks]

        def report(event: Report) -> None:
            for callback in heard:
                callback(event)

        return report

    @property
    def output_step(self) -> int:
        """The step that the parameters are of: the last one, or that which validated best."""
        return self._best_report.step if self._has_best else self.progress.step

    def take_best(self) -> None:
        """With `keep_best`, give the parameters the numbers that validated best. Where no step was
        validated yet, they stay those of the last one. `run` ends so, and takes the last ones back
        if it is called again."""
        has_validated = any(v.step for v in self.history.validations)
        if self._best is None or self._has_best or not has_validated:
            return
        if self._best_report.step != self.progress.step:
            self._exchange()

    @property
    def _best_report(self) -> ValidationReport:
        best = self.history.best
        assert best is not None
        return best

    def _exchange(self) -> None:
        """Exchange the parameters and those that are kept beside them: the best, or the last."""
        self._gather()
        data, kept = self.parameters.data, self._best
        assert kept is not None
        for i in range(0, len(data), _PIECE):
            piece = slice(i, i + _PIECE)
            data[piece], kept[piece] = kept[piece], data[piece].copy()
        write(self.parameters.buffers["data"], data)
        self._has_best = not self._has_best

    def _begin(self) -> None:
        self._stopping = False
        self._check_folder()
        threads.set(self.n_threads)
        self.passes.bind()
        if self._optimiser is None:
            kind, devices = OPTIMISERS[self.config.optimiser], self.model.devices
            self._optimiser = kind(self.parameters, self.config, devices)
            self._gradient = StepGradient(self.parameters, devices, self.ranks)

    def _check_folder(self) -> None:
        """CheckpointError if checkpoints would be written among, or over, those of another run."""
        folder = self.config.checkpoint_dir
        if folder is None:
            return
        if self.progress.step == 0 and checkpoint.existing(Path(folder)):
            raise CheckpointError(
                f"{folder}: holds checkpoints of an earlier run: resume from one, or name another "
                "folder"
            )
        others = checkpoint.strangers(Path(folder), self._is_ours)
        if others:
            raise CheckpointError(
                f"{folder}: {first_names([p.name for p in others])} is of another run, or no "
                "checkpoint: name another folder"
            )

    def _is_ours(self, path: Path) -> bool:
        """Whether a file is a checkpoint of this run."""
        return checkpoint.belongs(path, self._identity, _USUAL, _FREE)

    def _after_step(self, report: Callback) -> None:
        """Validate and write a checkpoint, each when it is due."""
        c, step = self.config, self.progress.step
        if self.is_done or (c.val_every and step % c.val_every == 0):
            self._validate(report)
        if c.checkpoint_every and step % c.checkpoint_every == 0:
            self._save(report)

    def _step(self) -> StepReport:
        began = perf_counter()
        at, train = self.progress, self.corpus.train
        windows = self._windows()
        assert self._optimiser is not None and self._gradient is not None
        self._gradient.begin()
        run = self.passes.train
        outcome = self.losses.over(run, train, windows, self.ranks, self._begin_batch)
        self._gradient.end(ceil(len(windows) / self.config.batch))
        loss = outcome.loss
        norm, lr = self._optimiser.clip(), self.learning_rate(at.step)
        if not isfinite(loss) or not isfinite(norm):
            about = f"step {at.step + 1}: the loss is {loss:g}, the gradient's length {norm:g}"
            raise self._divergence(about, run, train, windows)
        self._optimiser.check_length(norm)
        if self.before_update is not None:
            self.before_update(at.step + 1, self.passes.idle_memory)
        self._updating = True
        self._optimiser.step(lr, at.step + 1)
        self.progress = at.after(len(windows), self._n_read)
        self.history.losses.append(loss)
        self._updating = False
        seconds = perf_counter() - began
        n_tokens = train.n_targets(windows)
        return StepReport(
            *(at.step + 1, self.n_steps, at.epoch, loss, lr, norm, n_tokens, seconds),
            tally=outcome.tally,
            experts=outcome.experts,
        )

    def _begin_batch(self, i: int) -> None:
        """Begin batch i of the step under way, whose dropout and noise follow from its number."""
        assert self._gradient is not None
        self._gradient.next()
        self.passes.draw(self.config.seed, self.progress.step * self.config.grad_accum + i)

    def _divergence(
        self, about: str, run: Callable[[Batch], float], data: Dataset, windows: Windows
    ) -> PyggmlError:
        """Why a loss or a gradient is not finite: the windows are run one by one, until one is not
        either."""
        faults: list[Fault] = [about]
        assert self._gradient is not None
        for window in windows:
            self._gradient.begin()
            loss = self.losses.over(run, data, np.array([window])).loss
            if run == self.passes.evaluate and isfinite(loss):
                continue
            where = self.passes.first_not_finite()
            if where is not None:
                faults.append(
                    f"the first number that is not finite is made by {where}, of window "
                    f"{window + 1}{self._beginning(data.tokens[window])}"
                )
                break
        if self.progress.step == 0 and run == self.passes.evaluate:
            return PyggmlError([*faults, "the model's weights or its adapter make no numbers"])
        return PyggmlError([*faults, ("lr", "may be too high")])

    def _beginning(self, tokens: np.ndarray) -> str:
        """What a window begins with, for an error; nothing if the model has no vocabulary."""
        try:
            tokenizer = self.model.tokenizer
        except TokenizerError:
            return ""
        return f", which begins with {brief(tokenizer.decode(tokens[:12]))}"

    def _windows(self) -> np.ndarray:
        """The windows of the next step."""
        epoch, order = self._order
        if epoch != self.progress.epoch:
            epoch = self.progress.epoch
            order = self.corpus.train.order(self.config.seed, epoch, self.config.windows_per_step)
            self._order = (epoch, order[: self._n_read])
        return order[self.progress.index :][: self.config.windows_per_step]

    def _validate(self, report: Callback) -> None:
        sample = self.validation
        if sample is None:
            return
        windows = sample.windows
        outcome = self.losses.over(self.passes.evaluate, sample.dataset, windows, self.ranks)
        step, loss = self.progress.step, outcome.loss
        if not isfinite(loss):
            fault = f"after step {step} the validation loss is {loss:g}"
            raise self._divergence(fault, self.passes.evaluate, sample.dataset, windows)
        n_tokens = sample.dataset.n_targets(windows)
        about = margin(outcome.parts, sample.n_read / sample.n_held_out)
        made = ValidationReport(step, loss, n_tokens, outcome.tally, about, outcome.experts)
        self.history.validations.append(made)
        self._gather()
        if self._best is not None and self.history.best is self.history.validations[-1]:
            self._best[:] = self.parameters.data
        report(self.history.validations[-1])

    @property
    def _is_validated(self) -> bool:
        """Whether the last validation was after the last step."""
        made = self.history.validations
        return bool(made) and made[-1].step == self.progress.step

    def _gather(self) -> None:
        """Copy parameters and moments from the devices into the host's arrays."""
        p = self.parameters.buffers
        self.model.devices.gather(p["data"], p["m"], p["v"])

    # -- checkpoints ----------------------------------------------------------------------------

    def resume(self, path: str | Path) -> None:
        """Continue from a checkpoint, or the newest whole one of a folder; all that follows is bit
        for bit as without the break. The run may be longer or shorter than it was, and is validated
        and logged as the settings say now.

        Raises CheckpointError for a file that is damaged, of another run, or of another compute
        type. Warns if its run had another vector unit, Python or Numba: bits then differ.
        """
        here, path, run = Arithmetic.by(self.model), Path(path), self._identity
        path = checkpoint.newest(path) if path.is_dir() else path
        if checkpoint.has_older_identity(path):
            run = {**run, "model": checkpoint.older_identity(self.model.file.paths)}
        progress, history = checkpoint.load(path, self._buffers(), run, here, _USUAL, _FREE)
        if progress.step > self.n_steps:
            raise CheckpointError(
                f"{path}: was made after step {progress.step:,}, and this run ends with step "
                f"{self.n_steps:,}: more epochs or steps go on from it"
            )
        if progress.index >= self._n_read:
            raise CheckpointError(
                f"{path}: {progress.index:,} windows of its epoch were read, and an epoch has "
                f"{self._n_read:,} here: it is of other data"
            )
        self.progress, self.history, self._has_best = progress, history, False
        length = checkpoint.stored_length(path)
        if length not in (None, self.n_steps):
            warn(
                f"{path}: was of a run of {length} steps, this one has {self.n_steps}: the "
                "learning rate follows the new length from here on",
                RuntimeWarning,
                stacklevel=2,
            )

    def _save(self, report: Callback) -> None:
        """Write a checkpoint, if the settings ask for them and this step has none yet."""
        step = self.progress.step
        if self.config.checkpoint_dir is None or self._saved == step:
            return
        path = self.save()
        if self.ranks.is_first:
            report(CheckpointReport(step, path))

    def _rescue(self) -> None:
        """Save the last whole step at once. A launcher that ends all ranks because one has ended
        leaves them no time for the step under way, and the first may be the one that has ended."""
        step = self.progress.step
        has_last = not (self._updating or self._has_best)
        if not has_last or self.config.checkpoint_dir is None or step in (0, self._saved):
            return
        self._saved = step
        warn(f"stopping: step {step} is saved as {self._write()}", RuntimeWarning, stacklevel=1)

    def _write(self) -> Path:
        """The checkpoint of the last whole step; of all ranks it has the same bytes."""
        path = checkpoint.path_of(Path(str(self.config.checkpoint_dir)), self.progress.step)
        self._gather()
        made_by, buffers = Arithmetic.by(self.model), self._buffers()
        run = {**self._identity, checkpoint.LENGTH: self.n_steps}
        checkpoint.save(path, buffers, self.progress, self.history, run, made_by)
        return path

    def _buffers(self) -> dict[str, np.ndarray]:
        """What a checkpoint holds, by name."""
        p, optimiser = self.parameters, self.config.optimiser
        moments = {f"{optimiser}.{m}": getattr(p, m) for m in OPTIMISERS[optimiser].moments}
        constants = {"constants": p.constant_data} if p.constants else {}
        best = {} if self._best is None else {"best": self._best}
        return {"parameters": p.data} | moments | constants | best

    @property
    def n_in_last_step(self) -> int:
        """The windows of an epoch's last step: what the others leave of it."""
        whole = self.config.windows_per_step
        return self._n_read % whole or whole if self._n_read > whole else whole

    @cached_property
    def _identity(self) -> Mapping[str, Any]:
        """What a checkpoint must share with this run."""
        return {
            "model": str(identity(self.model.file)),
            "text": self.corpus.digest(),
            "adapter": self.parameters.about,
            "settings": {
                **self.corpus.about,
                "ctx": self.corpus.train.ctx,
                **self.config.shared_by_runs(),
                **self._of_objective(),
                **self._of_schedule(),
            },
            "tensors": {name: list(t.shape) for name, t in self.parameters.tensors.items()},
        }

    def _of_schedule(self) -> dict[str, Any]:
        """A schedule of the caller's has its function's name in the place of the settings'."""
        rate = self.learning_rate
        return {"lr_scheduler": rate.name} if isinstance(rate, OwnLearningRate) else {}

    def _of_objective(self) -> dict[str, Any]:
        """The objective, its settings, and the adapters of the model that it compares with."""
        about = {"objective": self.objective.name, **self.objective.shared_by_runs()}
        reference = self.reference
        if self.objective.has_reference and reference is not None and reference.adapters:
            about["reference"] = checkpoint.adapters_identity(reference)
        return about
