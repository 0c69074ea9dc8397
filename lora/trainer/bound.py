"""A run with the memory that it takes: its passes, its gradient, its optimiser."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from pyggml import threads
from pyggml.errors import Fault, PyggmlError
from pyggml.lora.objectives.objective import Lesson
from pyggml.lora.optim import OPTIMISERS, FlatOptimiser
from pyggml.lora.trainer.divergence import divergence
from pyggml.lora.trainer.gradient import StepGradient
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
