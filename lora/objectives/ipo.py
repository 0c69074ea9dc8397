"""IPO, identity preference optimisation (Azar et al. 2023, arXiv:2310.12036, equation 17).

loss = (h − 1/(2β))², h = (a_chosen − â_chosen) − (a_rejected − â_rejected), a and â the mean
log-probabilities of an answer's tokens, as TRL takes them; β is the paper's τ
"""

from dataclasses import dataclass
from typing import ClassVar

from pyggml.lora.objectives.answers import AnswerLeaves, PairObjective
from pyggml.lora.objectives.objective import LossNet, Outputs
from pyggml.ops import scale, sqr, sub


@dataclass(frozen=True, kw_only=True)
class IPO(PairObjective):
    """The lead of the chosen answer over the rejected one comes to 1/(2β), and stays there."""

    name: ClassVar[str] = "ipo"
    purpose: ClassVar[str] = "learns to prefer it up to a fixed lead, per token"
    has_reference: ClassVar[bool] = True
    per_token: ClassVar[bool] = True

    def loss(self, net: LossNet, batch: AnswerLeaves) -> Outputs:
        log_probs = batch.log_probs(net.token_losses(batch.targets, batch.read))
        chosen, rejected = batch.pairs(sub(log_probs, batch.reference))
        loss = sqr(scale(sub(chosen, rejected), 1.0, -0.5 / self.beta))
        return {"loss": batch.mean_of_pairs(loss), "log_probs": log_probs}
