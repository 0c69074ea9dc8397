"""Dr. GRPO, GRPO done right (Liu et al. 2025, arXiv:2503.20783).

A = reward − mean of the group
The loss is the sum over all tokens of the step's answers, divided by the most that they could have:
long answers count no less for each token, and groups that agree no more.
"""

from dataclasses import dataclass
from typing import ClassVar

from pyggml.lora.objectives.rewarded import RewardObjective


@dataclass(frozen=True, kw_only=True)
class DrGRPO(RewardObjective):
    """As GRPO, without what favours long wrong answers and easy prompts."""

    name: ClassVar[str] = "dr_grpo"
    purpose: ClassVar[str] = "learns as grpo, without its bias towards lengths and easy prompts"
    scaled: ClassVar[bool] = False

    def token_share(self, n_tokens: int, n_answers: int) -> float:
        return 1 / (self.answer_tokens * n_answers)
