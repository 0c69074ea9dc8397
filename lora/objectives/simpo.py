"""SimPO, simple preference optimisation (Meng, Xia, Chen 2024, arXiv:2405.14734).

loss = −ln σ(β·(a_chosen − a_rejected) − γ), a the mean log-probability of an answer's tokens
"""

from dataclasses import dataclass
from typing import ClassVar

from pyggml.lora.objectives.answers import AnswerLeaves, PairObjective
from pyggml.lora.objectives.objective import LossNet, Outputs
from pyggml.ops import scale, softplus, sub
from pyggml.settings import of_optimiser


@dataclass(frozen=True, kw_only=True)
class SimPO(PairObjective):
    """The chosen answer becomes likelier than the rejected one by a margin, token by token."""

    name: ClassVar[str] = "simpo"
    purpose: ClassVar[str] = "learns to prefer it by a margin, per token and without a reference"
    per_token: ClassVar[bool] = True

    beta: float = of_optimiser(
        2.0, "β, the scale of the mean log-probabilities", "above 0, at most 100", aliases=("beta",)
    )
    gamma: float = of_optimiser(
        1.0,
        "γ, the margin by which the reward of the chosen answer is to be higher",
        "0 to 100",
        aliases=("simpo-gamma",),
    )

    def loss(self, net: LossNet, batch: AnswerLeaves) -> Outputs:
        log_probs = batch.log_probs(net.token_losses(batch.targets, batch.read))
        chosen, rejected = batch.pairs(log_probs)
        loss = softplus(scale(sub(chosen, rejected), -self.beta, self.gamma))
        return {"loss": batch.mean_of_pairs(loss), "log_probs": log_probs}
