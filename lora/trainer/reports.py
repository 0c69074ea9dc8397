"""The reports of a run as it goes, and its history: the losses of every step and validation."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

_ENDS = 20  # steps at both ends of a run that a loss is averaged over
_ENOUGH = 5  # of them, before a rise of their mean is no noise


@dataclass(frozen=True, slots=True)
class Rewards:
    """Rewards of answers: β times the gain of an answer's ln p over the reference.

    ORPO has no reference: its reward is β times the mean log-probability of an answer's tokens.
    Right is a pair whose chosen answer has the higher reward; of KTO, an answer on its side of the
    KL. Rewards of several batches add up.
    """

    chosen_sum: float = 0.0
    rejected_sum: float = 0.0
    n_chosen: int = 0
    n_rejected: int = 0
    n_right: int = 0
    n_compared: int = 0

    @property
    def numbers(self) -> tuple[float, ...]:
        """The fields, in their order."""
        return astuple(self)

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Rewards:
        """The inverse of `numbers`."""
        chosen, rejected, *counts = numbers
        return cls(chosen, rejected, *map(int, counts))

    def __add__(self, other: Rewards) -> Rewards:
        return Rewards.of([a + b for a, b in zip(self.numbers, other.numbers, strict=True)])

    @property
    def chosen(self) -> float:
        """The mean reward of chosen, or wanted, answers; 0 without any."""
        return self.chosen_sum / max(self.n_chosen, 1)

    @property
    def rejected(self) -> float:
        """The mean reward of rejected, or unwanted, answers; 0 without any."""
        return self.rejected_sum / max(self.n_rejected, 1)

    @property
    def margin(self) -> float:
        return self.chosen - self.rejected

    @property
    def accuracy(self) -> float:
        """The share that is right, 0 to 1."""
        return self.n_right / max(self.n_compared, 1)


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step: mean loss before the update, the gradient's length before it was clipped."""

    step: int  # steps made, this one included
    n_steps: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float
    n_tokens: int  # trained
    seconds: float
    token_accuracy: float | None = None  # share of them that had the highest probability
    rewards: Rewards | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.n_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Mean loss over the held-out windows after `step` steps."""

    step: int
    loss: float
    n_tokens: int
    # Not in checkpoints:
    token_accuracy: float | None = field(default=None, compare=False)
    rewards: Rewards | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """A checkpoint that is safely on disk."""

    step: int
    path: Path


Report = StepReport | ValidationReport | CheckpointReport
Callback = Callable[[Report], None]


@dataclass(slots=True)
class History:
    """The losses of a run from its first step on, across resumptions."""

    losses: array[float] = field(default_factory=lambda: array("d"))
    validations: list[ValidationReport] = field(default_factory=list)

    @property
    def n_averaged(self) -> int:
        """Steps that each of `ends` is the mean of."""
        return max(1, min(_ENDS, len(self.losses) // 2))

    def ends(self) -> tuple[float, float]:
        """Mean losses of the first and of the last steps, each over enough steps for little
        noise."""
        n = self.n_averaged
        return fmean(self.losses[:n]), fmean(self.losses[-n:])

    @property
    def best(self) -> ValidationReport | None:
        """The validation with the lowest loss, the first of equals; None if there was none."""
        return min(self.validations, key=lambda v: v.loss, default=None)

    def has_stalled(self, patience: int) -> bool:
        """Whether the last `patience` validations were no better than one before them; 0: never."""
        best = self.best
        if not patience or best is None:
            return False
        return len(self.validations) - 1 - self.validations.index(best) >= patience

    @property
    def has_doubled(self) -> bool:
        """Whether the mean of the last steps is more than twice that of the first."""
        if len(self.losses) < 2 * _ENOUGH:
            return False
        first, last = self.ends()
        return last > 2 * first

    def arrays(self) -> dict[str, np.ndarray]:
        """As arrays by name, for a file."""
        return {
            "losses": np.array(self.losses, np.float64),
            "validation.steps": np.array([v.step for v in self.validations], np.uint64),
            "validation.losses": np.array([v.loss for v in self.validations], np.float64),
            "validation.tokens": np.array([v.n_tokens for v in self.validations], np.uint64),
        }

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> History:
        """From what `arrays` gave."""
        steps, losses, tokens = (arrays[f"validation.{k}"] for k in ("steps", "losses", "tokens"))
        found = zip(steps, losses, tokens, strict=True)
        return cls(
            array("d", arrays["losses"]),
            [ValidationReport(int(s), float(loss), int(n)) for s, loss, n in found],
        )
