"""What a batch adds to a report. The numbers of several batches, and of several ranks, add up."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Tally:
    """Numbers of a batch, each with a default of 0 or 0.0; subclasses name them."""

    @property
    def numbers(self) -> tuple[float, ...]:
        """The fields, in their order."""
        return astuple(self)

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
