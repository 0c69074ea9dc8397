"""GSPO, group sequence policy optimisation (Zheng et al. 2025, arXiv:2507.18071).

As GRPO, but r is a ratio of answers: that of the geometric means of their tokens' probabilities.
"""

from dataclasses import dataclass
from typing import ClassVar

from pyggml.graph.tensor import Tensor
from pyggml.lora.objectives.rewarded import RewardObjective, SampleLeaves
from pyggml.ops import mul_mat, reshape


@dataclass(frozen=True, kw_only=True)
class GSPO(RewardObjective):
    """As GRPO, with ratios of whole answers."""

    name: ClassVar[str] = "gspo"
    purpose: ClassVar[str] = "learns as grpo, with ratios of whole answers, as mixtures want them"
    per_answer: ClassVar[bool] = True

    def token_share(self, n_tokens: int, n_answers: int) -> float:
        return 1 / (n_tokens * n_answers)

    def log_ratios(self, batch: SampleLeaves, moved: Tensor) -> Tensor:
        return reshape(mul_mat(batch.members, reshape(moved, (1, -1))), (-1,))
