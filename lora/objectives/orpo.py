"""ORPO, odds ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691).

loss = NLL(prompt and chosen) − β·ln σ(odds(chosen) − odds(rejected)), odds(a) = a − ln(1 − eᵃ) of
the mean log-probability a of an answer's tokens. The NLL is the mean over the step's tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pyggml.lora.objectives.answers import AnswerLeaves, PairObjective
from pyggml.lora.objectives.objective import LossNet, Outputs
from pyggml.ops import add, clamp, expm1, log, mul, neg, scale, softplus, sub, sum_
from pyggml.settings import of_optimiser

_CERTAIN = -1e-7  # the highest mean log-probability whose odds are finite in float32


@dataclass(frozen=True, kw_only=True)
class ORPO(PairObjective):
    """Learns to write the chosen answer, and to prefer it, in one run."""

    name: ClassVar[str] = "orpo"
    purpose: ClassVar[str] = (
        "learns to write the chosen answer and to prefer it by the ratio of odds"
    )
    # It learns to write the answer too; the rate is that of TRL's example with LoRA.
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 8e-5, "epochs": 1, "warmup_ratio": 0.1}
    per_token: ClassVar[bool] = True
    learns_chosen: ClassVar[bool] = True

    beta: float = of_optimiser(
        0.1,
        "β (λ in the paper), the weight of the odds-ratio loss",
        "above 0, at most 100",
        aliases=("beta",),
    )

    def loss(self, net: LossNet, batch: AnswerLeaves) -> Outputs:
        losses = net.token_losses(batch.targets, batch.read)
        log_probs = batch.log_probs(losses)
        nll = sum_(mul(losses, batch.nll))
        at_most = clamp(log_probs, -np.inf, _CERTAIN)
        chosen, rejected = batch.pairs(sub(at_most, log(neg(expm1(at_most)))))
        ratio = batch.mean_of_pairs(softplus(neg(sub(chosen, rejected))))
        return {"loss": add(nll, scale(ratio, self.beta)), "log_probs": log_probs}
