"""KTO, Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306).

loss = w·(1 − σ(±β·(log p − log p̂ − KL))), + for wanted answers, − for others. KL ≥ 0 is the mean of
log p − log p̂ over mismatched answers, and a constant.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pyggml.errors import Fault
from pyggml.lora.objectives.answers import AnswerLeaves, LabelObjective
from pyggml.lora.objectives.objective import LossNet, Outputs
from pyggml.ops import mul, scale, sigmoid, sub, sum_
from pyggml.settings import of_optimiser


@dataclass(frozen=True, kw_only=True)
class KTO(LabelObjective):
    """Wanted answers become likelier and others less so, measured from a fixed model."""

    name: ClassVar[str] = "kto"
    purpose: ClassVar[str] = "learns from answers judged one by one, against the reference"
    has_reference: ClassVar[bool] = True
    has_kl: ClassVar[bool] = True

    desirable_weight: float = of_optimiser(1.0, "weight of the desirable answers", "0 to 1000")
    undesirable_weight: float = of_optimiser(1.0, "weight of the undesirable answers", "0 to 1000")

    def _faults(self) -> list[Fault]:
        if self.desirable_weight == 0 == self.undesirable_weight:
            fault = "is 0, as desirable_weight is: nothing would be learned"
            return [*super()._faults(), ("undesirable_weight", fault)]
        return super()._faults()

    def weights(self, sign: np.ndarray) -> np.ndarray:
        return np.where(sign > 0, self.desirable_weight, self.undesirable_weight)

    def loss(self, net: LossNet, batch: AnswerLeaves) -> Outputs:
        """1 − σ(x) is computed as σ(−x); the reference includes the KL."""
        log_probs = batch.log_probs(net.token_losses(batch.targets, batch.read))
        above = mul(batch.sign, sub(log_probs, batch.reference))
        loss = sum_(mul(sigmoid(scale(above, -self.beta)), batch.share))
        return {"loss": loss, "log_probs": log_probs}
