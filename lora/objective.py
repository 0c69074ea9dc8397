"""The objective of a run, as the training loop sees it: windows in, the loss of a step out.

An objective owns the run's graphs. `NextToken` learns texts and answers; `pyggml.lora.preference`
learns preferences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pyggml.lora.config import TrainConfig
from pyggml.lora.data import Corpus, Dataset
from pyggml.lora.parameters import Parameters
from pyggml.lora.passes import Passes
from pyggml.lora.reports import Rewards
from pyggml.model import Model

Windows = np.ndarray | range  # numbers of some windows of a dataset


@dataclass(frozen=True, slots=True)
class Outcome:
    """The mean loss over some windows, and the rewards of their answers in preference training."""

    loss: float
    rewards: Rewards | None = None


class Minimised(Protocol):
    """An objective with the planned graphs of one run."""

    passes: Passes

    def train(self, data: Dataset, windows: Windows) -> Outcome:
        """Add the gradients of one step over these windows; returns its loss."""

    def evaluate(self, data: Dataset, windows: Windows) -> Outcome:
        """The loss over these windows; nothing is trained."""


class Objective(Protocol):
    """What a run minimises, not yet bound to a run."""

    def settled(self) -> Mapping[str, Any]:
        """What a resumed run must share, by name."""

    def of(
        self, model: Model, parameters: Parameters, corpus: Corpus, config: TrainConfig
    ) -> Minimised:
        """Plan the graphs of a run, without memory so far."""


@dataclass(frozen=True, slots=True)
class NextToken:
    """The mean cross entropy of a step's trained tokens. fused: see `TokenLoss`."""

    fused: bool = True

    def settled(self) -> Mapping[str, Any]:
        return {"objective": "sft"}

    def of(
        self, model: Model, parameters: Parameters, corpus: Corpus, config: TrainConfig
    ) -> Minimised:
        ctx = corpus.train.ctx
        return _NextToken(Passes.of(model, parameters, config, ctx, self.fused), config.batch)


@dataclass(slots=True)
class _NextToken:
    passes: Passes
    batch: int

    def train(self, data: Dataset, windows: Windows) -> Outcome:
        return Outcome(sum(self.passes.train(b) for b in data.batches(windows, self.batch)))

    def evaluate(self, data: Dataset, windows: Windows) -> Outcome:
        return Outcome(sum(self.passes.evaluate(b) for b in data.batches(windows, self.batch)))
