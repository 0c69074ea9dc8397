"""DPO, direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290).

x = β·((log p_chosen − log p̂_chosen) − (log p_rejected − log p̂_rejected))
loss = −ln σ(x); with label smoothing ε: −(1 − ε)·ln σ(x) − ε·ln σ(−x)         (Mitchell 2023)
"""

from dataclasses import dataclass
from typing import ClassVar

from pyggml.lora.objectives.answers import AnswerLeaves, PairObjective
from pyggml.lora.objectives.objective import LossNet, Outputs
from pyggml.ops import add, neg, scale, softplus, sub
from pyggml.settings import of_optimiser


@dataclass(frozen=True, kw_only=True)
class DPO(PairObjective):
    """The chosen answer becomes likelier than the rejected one, measured from a fixed model."""

    name: ClassVar[str] = "dpo"
    purpose: ClassVar[str] = (
        "learns to prefer the chosen answer, against a reference, the model as it was"
    )
    has_reference: ClassVar[bool] = True

    label_smoothing: float = of_optimiser(
        0.0,
        "label smoothing: the share of pairs whose labels are taken to be swapped",
        "0 to below 0.5",
    )

    def loss(self, net: LossNet, batch: AnswerLeaves) -> Outputs:
        log_probs = batch.log_probs(net.token_losses(batch.targets, batch.read))
        chosen, rejected = batch.pairs(sub(log_probs, batch.reference))
        x = scale(sub(chosen, rejected), self.beta)
        loss = softplus(neg(x))
        if self.label_smoothing:  # −ln σ(−x) = x − ln σ(x)
            loss = add(loss, scale(x, self.label_smoothing))
        return {"loss": batch.mean_of_pairs(loss), "log_probs": log_probs}
