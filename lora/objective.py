"""What a run minimises, as the loop sees it: windows in, the loss of a step out.

An objective has the run's graphs. `NextToken` is that of text and of answers to learn;
`pyggml.lora.preference` has those of preferences.
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
    """The mean loss over some windows, and what answers earned, if that is what is trained."""

    loss: float
    rewards: Rewards | None = None


class Minimised(Protocol):
    """An objective with the graphs of one run, planned."""

    passes: Passes

    def train(self, data: Dataset, windows: Windows) -> Outcome:
        """The loss of one step over these windows; its gradients have been added."""

    def evaluate(self, data: Dataset, windows: Windows) -> Outcome:
        """The loss over these windows."""


class Objective(Protocol):
    """What a run minimises, before there is a run."""

    def settled(self) -> Mapping[str, Any]:
        """What a resumed run must share, by name."""

    def of(
        self, model: Model, parameters: Parameters, corpus: Corpus, config: TrainConfig
    ) -> Minimised:
        """Plan the graphs of a run, taking no memory for them yet."""


@dataclass(frozen=True, slots=True)
class NextToken:
    """Mean cross entropy of the trained tokens of a step. fused: see `TokenLoss`."""

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
