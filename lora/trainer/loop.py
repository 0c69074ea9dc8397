"""The training loop.

per step     the gradient, as the sum of its batches'; clip; the optimiser's step
at times     validation, checkpoint; both between two steps, where a run may also stop

Of several ranks each makes some batches of a step, and all the same optimiser's step.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from math import ceil, isfinite
from pathlib import Path
from time import perf_counter
from warnings import warn

import numpy as np

import pyggml
from pyggml import threads
from pyggml.lora.optim import OPTIMISERS, FlatOptimiser
from pyggml.lora.trainer.arithmetic import Arithmetic
from pyggml.lora.trainer.best import BestParameters
from pyggml.lora.trainer.checks import check_alike
from pyggml.lora.trainer.divergence import MAKES_NO_NUMBERS, MAY_BE_TOO_HIGH, divergence
from pyggml.lora.trainer.folder import RunFolder
from pyggml.lora.trainer.gradient import StepGradient
from pyggml.lora.trainer.plan import RunPlan
from pyggml.lora.trainer.rehearsal import seconds_a_step
from pyggml.lora.trainer.reports import (
    Callback,
    CheckpointReport,
    StepReport,
    ValidationReport,
    to_each,
)
from pyggml.lora.trainer.validation import margin

# The number of a step; what makes memory for so many float32, which lasts until the next pass.
BeforeUpdate = Callable[[int, Callable[[int], np.ndarray]], None]


class Trainer(RunPlan):
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

    _optimiser: FlatOptimiser | None = None  # taken by `_begin`, with what follows
    _gradient: StepGradient | None = None
    _stopping = False
    _updating = False
    before_update: BeforeUpdate | None = None

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
        start = self.progress.step
        check_alike(self.ranks, self._folder.about, Arithmetic.by(self.model))
        self._best.put_back()
        with ExitStack() as stack:
            with self.ranks.together():
                if self.ranks.is_first:
                    stack.enter_context(self._folder.hold())
            shown = [pyggml.show_run(self)] if progress and self.ranks.is_first else []
            report = to_each([*map(stack.enter_context, shown), *callbacks])
            self._begin()
            with self.model.devices.holding(*self.parameters.buffers.values()):
                try:
                    if not self.history.is_validated(start) and (start == 0 or self.is_done):
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

    def rehearse(self) -> float:
        """Seconds of a step after the first ones, of windows as long as the mean.

        Meant for a dry run: the parameters have changed afterwards, and nothing is on the disk.
        """
        self._begin()
        return seconds_a_step(self._step, self._windows, self.corpus.train, self.n_first)

    def _begin(self) -> None:
        """Take the memory of a run."""
        self._stopping = False
        if self.config.checkpoint_dir is not None:
            self._folder.check(is_new=self.progress.step == 0)
        threads.set(self.n_threads)
        self.passes.bind()
        if self._optimiser is None:
            kind, devices = OPTIMISERS[self.config.optimiser], self.model.devices
            self._optimiser = kind(self.parameters, self.config, devices)
            self._gradient = StepGradient(self.parameters, devices, self.ranks)

    def _step(self) -> StepReport:
        began = perf_counter()
        at, train, windows = self.progress, self.corpus.train, self._windows()
        gradient, optimiser, run = self._gradient, self._optimiser, self.passes.train
        assert optimiser is not None and gradient is not None
        gradient.begin()
        outcome = self.losses.over(run, train, windows, self.ranks, self._begin_batch)
        gradient.end(ceil(len(windows) / self.config.batch))
        loss, norm, lr = outcome.loss, optimiser.clip(), self.learning_rate(at.step)
        if not isfinite(loss) or not isfinite(norm):
            fault = f"step {at.step + 1}: the loss is {loss:g}, the gradient's length {norm:g}"
            of = self.model, self.losses, gradient
            raise divergence(fault, MAY_BE_TOO_HIGH, *of, run, train, windows)
        optimiser.check_length(norm)
        if self.before_update is not None:
            self.before_update(at.step + 1, self.passes.idle_memory)
        self._updating = True
        optimiser.step(lr, at.step + 1)
        self.progress = at.after(len(windows), self.order.n_read)
        self.history.losses.append(loss)
        self._updating = False
        seconds = perf_counter() - began
        n_tokens = train.n_targets(windows)
        return StepReport(
            *(at.step + 1, self.n_steps, at.epoch, loss, lr, norm, n_tokens, seconds),
            tally=outcome.tally,
            experts=outcome.experts,
            n_computed=train.n_computed(windows),
        )

    def _windows(self) -> np.ndarray:
        """The windows of the next step."""
        return self.order.after(self.progress)

    def _begin_batch(self, i: int) -> None:
        """Begin batch i of the step under way, whose dropout and noise follow from its number."""
        assert self._gradient is not None
        self._gradient.next()
        self.passes.draw(self.config.seed, self.progress.step * self.config.grad_accum + i)

    def _after_step(self, report: Callback) -> None:
        """Validate and write a checkpoint, each when it is due."""
        c, step = self.config, self.progress.step
        if self.is_done or (c.val_every and step % c.val_every == 0):
            self._validate(report)
        if c.checkpoint_every and step % c.checkpoint_every == 0:
            self._save(report)

    def _validate(self, report: Callback) -> None:
        sample, step, run = self.validation, self.progress.step, self.passes.evaluate
        if sample is None:
            return
        data, windows = sample.dataset, sample.windows
        outcome = self.losses.over(run, data, windows, self.ranks)
        loss, tally = outcome.loss, outcome.tally
        if not isfinite(loss):
            fault = f"after step {step} the validation loss is {loss:g}"
            cause = MAY_BE_TOO_HIGH if step else MAKES_NO_NUMBERS
            assert self._gradient is not None
            of = self.model, self.losses, self._gradient
            raise divergence(fault, cause, *of, run, data, windows)
        about = margin(outcome.parts, sample.n_read / sample.n_held_out)
        n_tokens = data.n_targets(windows)
        validation = ValidationReport(step, loss, n_tokens, tally, about, outcome.experts)
        self.history.validations.append(validation)
        self.model.devices.gather(self.parameters.buffers["data"])
        self._best.note(self.history)
        report(validation)

    # -- its end, and what it leaves -----------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Whether all steps are made, or validations say that more would not help."""
        return self.progress.step >= self.n_steps or self.history.has_stalled(self.config.patience)

    def stop(self) -> None:
        """End the run after the step under way; for signal handlers and other threads."""
        self._stopping = True
        if self.ranks.size > 1:
            self._rescue()

    def save(self) -> Path:
        """Write a checkpoint of the last whole step now; its path. For callbacks.

        Raises ConfigError if `checkpoint_dir` names no folder.
        """
        path = self._folder.begin(self.progress.step)
        if self.ranks.is_first:
            self._folder.write(self.progress, self.history)
            self._folder.prune()
        return path

    def resume(self, path: str | Path) -> None:
        """Continue from a checkpoint, or the newest whole one of a folder; all that follows is bit
        for bit as without the break. The run may be longer or shorter than it was, and is validated
        and logged as the settings say now.

        Raises CheckpointError for a file that is damaged, of another run, or of another compute
        type. Warns if its run had another vector unit, Python or Numba: bits then differ.
        """
        self.progress, self.history = self._folder.load(Path(path))
        self._best.is_taken = False

    def take_best(self) -> None:
        """With `keep_best`, give the parameters the numbers that validated best. Where no step was
        validated yet, they stay those of the last one. `run` ends so, and takes the last ones back
        if it is called again."""
        self._best.take(self.history, self.progress.step)

    @property
    def output_step(self) -> int:
        """The step that the parameters are of: the last one, or that which validated best."""
        best = self.history.best
        return best.step if self._best.is_taken and best is not None else self.progress.step

    def _save(self, report: Callback) -> None:
        """Write a checkpoint, if the settings ask for them and this step has none yet."""
        step = self.progress.step
        if self._folder.lacks(step):
            path = self.save()
            if self.ranks.is_first:
                report(CheckpointReport(step, path))

    def _rescue(self) -> None:
        """Save the last whole step at once. A launcher that ends all ranks because one has ended
        leaves them no time for the step under way, and the first may be the one that has ended."""
        step, has_last = self.progress.step, not (self._updating or self._best.is_taken)
        if step and has_last and self._folder.lacks(step):
            path = self._folder.begin(step)
            self._folder.write(self.progress, self.history)
            warn(f"stopping: step {step} is saved as {path}", RuntimeWarning, stacklevel=1)

    @cached_property
    def _folder(self) -> RunFolder:
        return RunFolder(self, self._best)

    @cached_property
    def _best(self) -> BestParameters:
        return BestParameters(self.parameters, self.model.devices, self.config.keep_best)
