"""The objective of a run, as the training loop sees it: windows in, the loss of a step out.

An objective owns the run's graphs. `NextToken` learns texts and answers; `preference`
learns preferences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from typing import Any, Protocol, TypeVar

import numpy as np

from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.config import TrainConfig
from pyggml.lora.data import Batch, Corpus, Dataset
from pyggml.lora.ranks import ALONE, Ranks
from pyggml.lora.trainer.passes import Passes
from pyggml.lora.trainer.reports import Rewards
from pyggml.model import Model

B = TypeVar("B")
Windows = np.ndarray | range  # numbers of some windows of a dataset


@dataclass(frozen=True, slots=True)
class Outcome:
    """The mean loss over some windows.

    n_right   their learned tokens that the model gives the highest probability; None in preference
              training
    rewards   those of their answers in preference training
    """

    loss: float
    n_right: int | None = None
    rewards: Rewards | None = None

    def share_right(self, n_tokens: int) -> float | None:
        """Of so many learned tokens."""
        return None if self.n_right is None else self.n_right / max(n_tokens, 1)


@dataclass(frozen=True, slots=True)
class Sharing:
    """How ranks share the batches of a step.

    before    called with the number of each batch that this rank runs, ahead of it
    """

    ranks: Ranks = ALONE
    before: Callable[[int], None] = lambda i: None

    def over(
        self, batches: Iterable[B], n: int, run: Callable[[B], Sequence[float]], width: int
    ) -> np.ndarray:
        """(n, width) float64: what `run` returns of each of n batches, whoever runs it."""
        mine = self.ranks.share(n)
        rows = np.empty((len(mine), width))
        with self.ranks.together():
            for i, batch in enumerate(islice(batches, mine.start, mine.stop)):
                self.before(mine.start + i)
                rows[i] = run(batch)
        return self.ranks.joined(rows, n)


NOT_SHARED = Sharing()


class Minimised(Protocol):
    """An objective with the planned graphs of one run."""

    passes: Passes

    def train(self, data: Dataset, windows: Windows, sharing: Sharing = NOT_SHARED) -> Outcome:
        """Add the gradients of one step over these windows; returns its loss."""

    def evaluate(self, data: Dataset, windows: Windows, sharing: Sharing = NOT_SHARED) -> Outcome:
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
    """The mean cross entropy of a step's trained tokens."""

    def settled(self) -> Mapping[str, Any]:
        return {"objective": "sft"}

    def of(
        self, model: Model, parameters: Parameters, corpus: Corpus, config: TrainConfig
    ) -> Minimised:
        passes = Passes.of(model, parameters, config, corpus.train.ctx, corpus.lengths)
        return _NextToken(passes, config.batch)


@dataclass(slots=True)
class _NextToken:
    passes: Passes
    batch: int

    def train(self, data: Dataset, windows: Windows, sharing: Sharing = NOT_SHARED) -> Outcome:
        return self._outcome(self.passes.train, data, windows, sharing)

    def evaluate(self, data: Dataset, windows: Windows, sharing: Sharing = NOT_SHARED) -> Outcome:
        return self._outcome(self.passes.evaluate, data, windows, sharing)

    def _outcome(
        self, run: Callable[[Batch], float], data: Dataset, windows: Windows, sharing: Sharing
    ) -> Outcome:
        def loss_and_right(batch: Batch) -> tuple[float, float]:
            return run(batch), float(self.passes.watched[0])

        n = ceil(len(windows) / self.batch)
        loss, n_right = 0.0, 0
        batches = data.batches(windows, self.batch)
        for part, right in sharing.over(batches, n, loss_and_right, 2).tolist():
            loss += part
            n_right += int(right)
        return Outcome(loss, n_right)
