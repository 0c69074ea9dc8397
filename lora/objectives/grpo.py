"""GRPO, group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300).

A = (reward − mean of the group) / (standard deviation of the group + 10⁻⁴)
The loss is the mean over the step's answers of the means over their tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

from pyggml.lora.objectives.rewarded import RewardObjective


@dataclass(frozen=True, kw_only=True)
class GRPO(RewardObjective):
    """Answers that earn more than others to their prompt become likelier."""

    name: ClassVar[str] = "grpo"
    purpose: ClassVar[str] = "learns from rewards of sampled answers, each against its group"

    def token_share(self, n_tokens: int, n_answers: int) -> float:
        return 1 / (n_tokens * n_answers)
