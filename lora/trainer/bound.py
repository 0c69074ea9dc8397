"""A run with the memory that it takes, its passes, gradient and optimiser; and their update, the
part of a step between what it trains on and its report."""

from collections.abc import Callable
from functools import cached_property
from math import isfinite
from typing import Any

import numpy as np

from pyggml import threads
from pyggml.errors import Fault, PyggmlError
from pyggml.lora.objectives.objective import Lesson
from pyggml.lora.optim import OPTIMISERS, FlatOptimiser, StepsInBackward
from pyggml.lora.optim.in_backward import LossNotFiniteError
from pyggml.lora.trainer.divergence import MAY_BE_TOO_HIGH, divergence
from pyggml.lora.trainer.gradient import StepGradient
from pyggml.lora.trainer.losses import Outcome
from pyggml.lora.trainer.saved import SavedRun

# The number of a step; what makes memory for so many float32, which lasts until the next pass.
BeforeUpdate = Callable[[int, Callable[[int], np.ndarray]], None]


class BoundRun(SavedRun):
    """A run whose memory is taken by its first step.

    before_update: called with the number of a step before it changes the parameters, and with
    `Passes.idle_memory`; None, or a function that a recorder sets.
    """

    before_update: BeforeUpdate | None = None

    @cached_property
    def optimiser(self) -> FlatOptimiser:
        kind = OPTIMISERS[self.config.optimiser]
        return kind(self.parameters, self.config, self.model.devices)

    @cached_property
    def gradient(self) -> StepGradient:
        return StepGradient(self.parameters, self.model.devices, self.ranks, self.passes.groups)

    def _begin(self) -> None:
        """Take the memory of a run."""
        self._stopping = False
        if self.config.checkpoint_dir is not None:
            self._folder.check(is_new=self.progress.step == 0)
        threads.set(self.n_threads)
        self.passes.bind()
        _ = self.gradient
        if self.passes.steps is None:
            self.optimiser.bind()

    def _windows(self) -> np.ndarray:
        """The windows of the next step."""
        return self.order.after(self.progress)

    def _lesson(self) -> Lesson:
        """What the next step trains on."""
        train, windows, practice = self.corpus.train, self._windows(), self.losses.practice
        if practice is None:
            return Lesson(train, windows, len(windows))
        return practice.lesson(self.progress.step, train, windows, self.ranks, self.passes.arenas)

    def _update(self, lesson: Lesson, lr: float) -> tuple[Outcome, float]:
        """What a step trains on, run, and its update; the gradient's length before it was clipped.

        Raises PyggmlError, naming the step, if loss or gradient is not finite.
        """
        steps = self.passes.steps
        return self._at_end(lesson, lr) if steps is None else self._within(lesson, lr, steps)

    def _at_end(self, lesson: Lesson, lr: float) -> tuple[Outcome, float]:
        """The gradient of a step's batches, then the optimiser's step."""
        gradient, optimiser, n = self.gradient, self.optimiser, self.progress.step + 1
        gradient.begin()
        lengths: list[Callable[[], float]] = []

        def after() -> None:
            gradient.begin_sum(-(-len(lesson.windows) // self.config.batch))
            lengths.append(optimiser.begin_clip())
            optimiser.begin(lr, n)  # while a device still computes

        try:
            outcome = self._over(lesson, after)
            gradient.wait()
        except BaseException:
            gradient.give_up()
            raise
        norm = lengths.pop()()
        if not isfinite(outcome.loss) or not isfinite(norm):
            raise self._no_numbers(outcome.loss, norm, lesson)
        optimiser.check_length(norm)
        if self.before_update is not None:
            self.before_update(n, self.passes.idle_memory)
        self._updating = True
        optimiser.update()
        return outcome, norm

    def _within(self, lesson: Lesson, lr: float, steps: StepsInBackward) -> tuple[Outcome, float]:
        """Steps within the backward pass, of the one batch that a step then has."""
        steps.begin(lr, self.progress.step + 1)
        self._updating = True
        try:
            outcome = self._over(lesson)
        except LossNotFiniteError as error:
            self._updating = False
            raise self._no_numbers(error.loss, 0.0, lesson) from None
        norm = float(self.parameters.length[0])
        if not isfinite(norm):
            raise self._no_numbers(outcome.loss, norm, lesson)
        self.optimiser.check_length(norm)
        return outcome, norm

    def _over(self, lesson: Lesson, after: Callable[[], object] = lambda: None) -> Outcome:
        return self.losses.over(
            lesson.dataset, lesson.windows, self.ranks, self._begin_batch, after, alone=False
        )

    def _no_numbers(self, loss: float, norm: float, lesson: Lesson) -> PyggmlError:
        """The error of a step whose loss or gradient is not finite."""
        fault = f"step {self.progress.step + 1}: the loss is {loss:g}"
        fault += f", the gradient's length {norm:g}"
        alone = self.passes.steps is not None  # a pass with steps would change the parameters
        return self._divergence(fault, MAY_BE_TOO_HIGH, alone, lesson.dataset, lesson.windows)

    def _begin_batch(self, i: int, part: int | None) -> None:
        """Begin batch i of the step under way, whose dropout and noise follow from its number; or a
        part of it."""
        if self.passes.steps is None:
            self.gradient.next(part)
        if not part:
            self.passes.draw(self.config.seed, self.progress.step * self.config.grad_accum + i)

    def _divergence(self, fault: Fault, cause: Fault, *read: Any) -> PyggmlError:
        """read: whether the loss alone, of what, and of which of its windows."""
        return divergence(fault, cause, self.model, self.losses, self.gradient, *read)
