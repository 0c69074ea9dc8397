"""The reports of a run as it goes, and its history: the losses of every step and validation."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from pyggml.lora.objectives.tally import Rewards, Tally, TokensRight
from pyggml.lora.trainer.experts import ExpertReport

_ENDS = 20  # steps at both ends of a run that a loss is averaged over
_LITTLE = 0.05  # a loss that is 0 but for noise, as of answers against their group, may double
_ENOUGH = 5  # of them, before a rise of their mean is no noise


class TallyReport:
    """A report with a tally, as its figures are asked for."""

    __slots__ = ()
    tally: Tally | None

    @property
    def token_accuracy(self) -> float | None:
        """The share of learned tokens that had the highest probability, if they are counted."""
        return self.tally.accuracy if isinstance(self.tally, TokensRight) else None

    @property
    def rewards(self) -> Rewards | None:
        """Those of answers, if they earn any."""
        return self.tally if isinstance(self.tally, Rewards) else None

    @property
    def words(self) -> str:
        """What the objective counts, as a part of a line; nothing if it counts nothing."""
        return "" if self.tally is None else f"  {self.tally.words}"


@dataclass(frozen=True, slots=True)
class StepReport(TallyReport):
    """One step: mean loss before the update, the gradient's length before it was clipped."""

    step: int  # steps made, this one included
    n_steps: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float
    n_tokens: int  # trained
    seconds: float
    tally: Tally | None = None  # what the objective counts
    experts: ExpertReport | None = None  # of a mixture
    n_computed: int = 0  # tokens, those that are read alone and padding among them
    sampled: Mapping[str, Any] | None = None  # of answers that it was made of

    @property
    def tokens_per_second(self) -> float:
        """0 where the clock stood still."""
        return self.n_tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        speed = f"{self.tokens_per_second:,.0f} tokens/s"
        return (
            f"step {self.step}/{self.n_steps}  loss {self.loss:.4f}{self.words}  lr {self.lr:.2e}"
            f"  |g| {self.grad_norm:.3g}  {speed}"
        )


@dataclass(frozen=True, slots=True)
class ValidationReport(TallyReport):
    """Mean loss over the held-out windows after `step` steps.

    margin: where only a sample of the held-out windows was read, the loss of all of them lies
    within this distance of it with a probability of 95 %; None if all were read
    """

    step: int
    loss: float
    n_tokens: int
    tally: Tally | None = field(default=None, compare=False)  # not in checkpoints
    margin: float | None = field(default=None, compare=False)  # nor this
    experts: ExpertReport | None = field(default=None, compare=False)  # nor this

    def __str__(self) -> str:
        about = "" if self.margin is None else f" ± {self.margin:.2g}"
        return f"step {self.step}  validation loss {self.loss:.4f}{about}{self.words}"


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """A checkpoint that is safely on disk."""

    step: int
    path: Path

    def __str__(self) -> str:
        return f"step {self.step}  checkpoint {self.path}"


Report = StepReport | ValidationReport | CheckpointReport
Callback = Callable[[Report], None]


def to_each(callbacks: Sequence[Callback]) -> Callback:
    """One callback that passes each report on to these, in their order."""

    def report(event: Report) -> None:
        for callback in callbacks:
            callback(event)

    return report


@dataclass(slots=True)
class History:
    """The losses of a run from its first step on, across resumptions."""

    losses: array[float] = field(default_factory=lambda: array("d"))
    validations: list[ValidationReport] = field(default_factory=list)

    @property
    def n_averaged(self) -> int:
        """The number of steps over which each of `ends` is a mean."""
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

    def is_validated(self, step: int) -> bool:
        """Whether the last validation was after this step."""
        return bool(self.validations) and self.validations[-1].step == step

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
        return last > 2 * max(first, _LITTLE)

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
        rows = zip(steps, losses, tokens, strict=True)
        return cls(
            array("d", arrays["losses"]),
            [ValidationReport(int(s), float(loss), int(n)) for s, loss, n in rows],
        )
