"""Distillation: learns a teacher's probabilities (`pyggml.lora.objectives.taught`) of texts."""

from dataclasses import dataclass
from typing import ClassVar

from pyggml.lora.objectives.objective import TextObjective
from pyggml.lora.objectives.taught import TaughtObjective
from pyggml.settings import of_optimiser


@dataclass(frozen=True, kw_only=True)
class Distill(TaughtObjective, TextObjective):
    """Learns a teacher's probabilities of each next token."""

    name: ClassVar[str] = "distill"
    purpose: ClassVar[str] = "learns a teacher's probabilities of each token of texts or answers"

    hard_weight: float = of_optimiser(
        0.5,
        "α, the weight of the cross entropy with the text itself; the rest is the teacher's",
        "0 to 1",
    )

    @property
    def alpha(self) -> float:
        return self.hard_weight
