"""What a batch adds to a report. The numbers of several batches, and of several ranks, add up."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isqrt
from typing import Any, Self

import numpy as np

from pyggml.look.confusion import Confusion


@dataclass(frozen=True, slots=True)
class Tally:
    """Numbers of a batch, each with a default of 0 or 0.0; subclasses name them."""

    @property
    def numbers(self) -> tuple[float, ...]:
        """The fields, in their order."""
        return tuple(getattr(self, f.name) for f in fields(self))

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Self:
        """The inverse of `numbers`."""
        kinds = [type(f.default) for f in fields(cls)]
        return cls(*(int(x) if k is int else x for k, x in zip(kinds, numbers, strict=True)))

    def __add__(self, other: Self) -> Self:
        return self.of([a + b for a, b in zip(self.numbers, other.numbers, strict=True)])

    def figures(self) -> dict[str, Any]:
        """What a record of the run holds, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def whole_figures(self) -> dict[str, Any]:
        """The same of all that is held out, with what a step is too small for."""
        return self.figures()

    @property
    def words(self) -> str:
        """The same on a terminal."""
        return ", ".join(f"{name} {value:g}" for name, value in self.figures().items())


@dataclass(frozen=True, slots=True)
class TokensRight(Tally):
    """Learned tokens, and those of them that the model gives the highest probability."""

    n_right: int = 0
    n_tokens: int = 0

    @property
    def accuracy(self) -> float:
        """The share that is right, 0 to 1."""
        return self.n_right / max(self.n_tokens, 1)

    def figures(self) -> dict[str, Any]:
        return {"token_accuracy": self.accuracy}

    @property
    def words(self) -> str:
        return f"accuracy {100 * self.accuracy:.1f} %"


@dataclass(frozen=True, slots=True)
class Rewards(Tally):
    """Rewards of answers: β times the gain of an answer's ln p over the reference, or β · ln p
    where there is none.

    n_right of n_compared: of pairs, those whose chosen answer has the higher reward; of answers
    that are judged one by one, those on their side of the KL.
    """

    chosen_sum: float = 0.0
    rejected_sum: float = 0.0
    n_chosen: int = 0
    n_rejected: int = 0
    n_right: int = 0
    n_compared: int = 0

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

    def figures(self) -> dict[str, Any]:
        names = ("chosen", "rejected", "margin", "accuracy")
        return {"rewards": {name: getattr(self, name) for name in names}}

    @property
    def words(self) -> str:
        each = f"chosen {self.chosen:+.3f}  rejected {self.rejected:+.3f}"
        return f"{each}  {100 * self.accuracy:.0f} % right"


@dataclass(frozen=True, slots=True)
class WrittenAnswers(Tally):
    """Sampled answers that nobody judges."""

    n_answers: int = 0
    n_answer_tokens: int = 0
    n_cut: int = 0

    def figures(self) -> dict[str, Any]:
        n = max(self.n_answers, 1)
        return {"answers": {"length": self.n_answer_tokens / n, "cut": self.n_cut / n}}

    @property
    def words(self) -> str:
        n = max(self.n_answers, 1)
        return f"{self.n_answer_tokens / n:.1f} tokens  {100 * self.n_cut / n:.0f} % cut"


@dataclass(frozen=True, slots=True)
class JudgedAnswers(Tally):
    """Sampled answers and what they earned.

    n_judged    of n_answers, those with a reward
    spread_sum  of n_groups the standard deviations of rewards
    n_alike     groups of which nothing is learned, as all their answers earned the same
    n_clipped   of n_ratios, those that count no further
    kl_sum      of n_learned tokens, their KL from the model as it was
    """

    reward_sum: float = 0.0
    n_judged: int = 0
    n_answers: int = 0
    n_answer_tokens: int = 0
    n_cut: int = 0
    spread_sum: float = 0.0
    n_groups: int = 0
    n_alike: int = 0
    n_clipped: int = 0
    n_ratios: int = 0
    kl_sum: float = 0.0
    n_learned: int = 0

    @property
    def reward(self) -> float:
        """The mean of answers; 0 without any."""
        return self.reward_sum / max(self.n_judged, 1)

    @property
    def length(self) -> float:
        """Tokens of an answer, the mean."""
        return self.n_answer_tokens / max(self.n_answers, 1)

    def figures(self) -> dict[str, Any]:
        figures = {
            "reward": self.reward,
            "spread": self.spread_sum / max(self.n_groups, 1),
            "length": self.length,
            "cut": self.n_cut / max(self.n_answers, 1),
            "alike": self.n_alike / max(self.n_groups, 1),
            "clipped": self.n_clipped / max(self.n_ratios, 1),
            "kl": self.kl_sum / max(self.n_learned, 1),
            "unjudged": self.n_answers - self.n_judged,
        }
        return {"answers": figures}

    @property
    def words(self) -> str:
        alike = f"  {self.n_alike} of {self.n_groups} alike" if self.n_alike else ""
        cut = f"  {100 * self.n_cut / max(self.n_answers, 1):.0f} % cut" if self.n_cut else ""
        return f"reward {self.reward:.3f}  {self.length:.1f} tokens{cut}{alike}"


@dataclass(frozen=True, slots=True)
class PairsRight(Tally):
    """Anchors, and those whose positive is the nearest of all that they are compared with."""

    n_right: int = 0
    n_pairs: int = 0

    @property
    def accuracy(self) -> float:
        """The share that is right, 0 to 1."""
        return self.n_right / max(self.n_pairs, 1)

    def figures(self) -> dict[str, Any]:
        return {"nearest": self.accuracy}

    @property
    def words(self) -> str:
        return f"nearest {100 * self.accuracy:.1f} %"


@dataclass(frozen=True, slots=True)
class ClassCounts(Tally):
    """How many texts of each class were taken for each: row by row the numbers of `Confusion`."""

    counts: tuple[int, ...] = ()

    @property
    def numbers(self) -> tuple[float, ...]:
        return self.counts

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Self:
        return cls(tuple(map(int, numbers)))

    def __add__(self, other: Self) -> Self:
        both = zip(self.counts, other.counts, strict=True)
        return type(self)(tuple(a + b for a, b in both)) if self.counts else other

    @property
    def confusion(self) -> Confusion:
        n = isqrt(len(self.counts))
        return Confusion(np.array(self.counts, np.int64).reshape(n, n))

    def figures(self) -> dict[str, Any]:
        confusion = self.confusion
        return {"classes": {"accuracy": confusion.accuracy, "macro_f1": confusion.macro_f1}}

    def whole_figures(self) -> dict[str, Any]:
        return {
            "classes": {**self.figures()["classes"], "confusion": self.confusion.counts.tolist()}
        }

    @property
    def words(self) -> str:
        confusion = self.confusion
        return f"accuracy {100 * confusion.accuracy:.1f} %, F1 {100 * confusion.macro_f1:.1f} %"
