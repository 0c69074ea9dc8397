"""SFT, supervised fine-tuning: the mean cross entropy of a step's learned tokens."""

from dataclasses import dataclass
from typing import ClassVar

from pyggml.lora.objectives.objective import LossNet, Outputs, TextLeaves, TextObjective


@dataclass(frozen=True, kw_only=True)
class SFT(TextObjective):
    """Learns to write texts, and the answers of rows."""

    name: ClassVar[str] = "sft"
    purpose: ClassVar[str] = "learns to write texts, completions or chats (supervised)"

    def loss(self, net: LossNet, batch: TextLeaves) -> Outputs:
        loss = net.token_loss(batch.targets, batch.weights)
        return {"loss": loss, "n_right": loss.saved[0]}
