"""The training loop.

per step     the gradient, as the sum of its batches'; clip; the optimiser's step
at times     validation, checkpoint; both between two steps, where a run may also stop

Of several ranks each makes some batches of a step, and all the same optimiser's step.
"""

from contextlib import ExitStack
from itertools import chain
from math import isfinite
from time import perf_counter

import pyggml
from pyggml.lora.trainer.bound import BoundRun
from pyggml.lora.trainer.checks import check_alike
from pyggml.lora.trainer.divergence import MAKES_NO_NUMBERS, MAY_BE_TOO_HIGH
from pyggml.lora.trainer.reports import Callback, StepReport, ValidationReport, to_each
from pyggml.lora.trainer.validation import margin


class Trainer(BoundRun):
    """A run: a model, what of it is trained, on what, and how.

    parameters   leaves of the graphs that `model` builds: an adapter's, or the model's own weights
    objective    what is minimised; to write the text, unless it is given
    reference    the fixed model that answers are compared with, by objectives that do so: the base,
                 or the base with the adapter from which training starts
    schedule     the learning rate as a function of the step, the number of steps and the history
                 of losses, instead of the settings' schedule: lambda step, n_steps, history: …

    Memory is taken by `run`, not before. Every one of several ranks has a Trainer and calls it
    alike; the first one alone writes checkpoints.
    Raises ConfigError if the settings do not fit the model, DataError for tokens that it lacks.
    """

    def run(self, *callbacks: Callback, progress: bool = True) -> bool:
        """Train to the end; True if it was reached, False if `stop` or Ctrl-C ended it early.

        callbacks  each is called with every report, between two steps: it may call `stop`, `save`,
                   and the adapter's `save`
        progress   whether the run is shown: as a bar on a terminal and in a notebook, else as lines

        The parameters are then those after the last whole step, and a checkpoint of them exists if
        the settings ask for one and a step was made; with `keep_best`, `take_best` follows.

        Raises PyggmlError, naming the step, if loss or gradient is not finite, or if another rank
        fails; RankLostError if one does not come any more, the last whole step being saved; and
        CheckpointError if the folder for checkpoints is another run's.
        """
        start = self.progress.step
        check_alike(self.ranks, self._folder.about, self.model)
        self._best.put_back()
        with ExitStack() as stack:
            with self.ranks.together():
                if self.ranks.is_first:
                    stack.enter_context(self._folder.hold())
            shown = [pyggml.show_run(self)] if progress and self.ranks.is_first else []
            report = to_each([*map(stack.enter_context, shown), *callbacks])
            self._begin()
            p = self.parameters
            leaves = chain(p.trained_leaves, *p.buffers.values(), p.own_leaves.values())
            held = self.model.devices.holding(*leaves)
            with held, self._ended_between_steps():
                if not self.history.is_validated(start) and (start == 0 or self.is_done):
                    self._validate(report)
                while not self.ranks.any(self._stopping) and not self.is_done:
                    with self.ranks.telling():
                        report(self._step())
                        self._after_step(report)
            if self.progress.step > start:
                self._save(report)
            self.take_best()
            return self.is_done

    def rehearse(self) -> float:
        """The seconds that a step takes, after the first ones, with windows of mean length.

        Meant for a dry run: the parameters have changed afterwards, and nothing is on the disk.
        """
        self._begin()
        for _ in range(self.n_first):
            self._step()
        train, windows = self.corpus.train, self._windows()
        share = train.n_computed() / len(train) * len(windows) / train.n_computed(windows)
        return self._step().seconds * share

    def _step(self) -> StepReport:
        began = perf_counter()
        at, lesson = self.progress, self._lesson()
        train, windows, lr = lesson.dataset, lesson.windows, self.learning_rate(at.step)
        outcome, norm = self._update(lesson, lr)
        loss = outcome.loss
        self.parameters.pack(self.model.devices)
        self.progress = at.after(lesson.n_read, self.order.n_read)
        self.history.losses.append(loss)
        self._updating = False
        seconds = perf_counter() - began
        n_tokens, n_computed = train.n_targets(windows), train.n_computed(windows)
        tally = outcome.tally if lesson.tally is None else lesson.tally + outcome.tally
        return StepReport(
            at.step + 1, self.n_steps, at.epoch, loss, lr, norm, n_tokens, seconds,
            tally=tally, experts=outcome.experts, n_computed=n_computed, sampled=lesson.about,
        )  # fmt: skip

    def _after_step(self, report: Callback) -> None:
        """Validate and write a checkpoint, each when it is due."""
        c, step = self.config, self.progress.step
        if self.is_done or (c.val_every and step % c.val_every == 0):
            self._validate(report)
        if c.checkpoint_every and step % c.checkpoint_every == 0:
            self._save(report)

    def _validate(self, report: Callback) -> None:
        sample, step = self.validation, self.progress.step
        if sample is None:
            return
        data, windows = sample.dataset, sample.windows
        outcome = self.losses.validate(data, windows, self.ranks)
        loss, tally = outcome.loss, outcome.tally
        if not isfinite(loss):
            fault = f"after step {step} the validation loss is {loss:g}"
            cause = MAY_BE_TOO_HIGH if step else MAKES_NO_NUMBERS
            raise self._divergence(fault, cause, True, data, windows)
        about = margin(outcome.parts, sample.n_read / sample.n_held_out)
        n_tokens = data.n_targets(windows)
        validation = ValidationReport(step, loss, n_tokens, tally, about, outcome.experts)
        self.history.validations.append(validation)
        self.model.devices.gather(*self.parameters.trained_leaves)
        self._best.note(self.history)
        report(validation)
