"""How a run's batches load the experts of a mixture: what its graphs count, and a report of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pyggml.graph.arrays import write
from pyggml.graph.tensor import Tensor
from pyggml.lora.data import WindowBatch
from pyggml.lora.objectives.objective import Leaves
from pyggml.models import Net, balance_loss, expert_load
from pyggml.ops import add, mul, scale

LOAD, BALANCE = "expert_load", "balance_loss"  # outputs of a graph


@dataclass(frozen=True, slots=True)
class BalanceLeaves(Leaves):
    """The leaves by which a batch of T tokens counts.

    share    (T,) each token's part of the batch; 0 where it only fills up a window
    weight   () the batch's part of its step
    """

    share: Tensor
    weight: Tensor

    @classmethod
    def empty(cls, n_tokens: int) -> BalanceLeaves:
        return cls.of_shapes(share=(n_tokens,), weight=())

    def outputs(self, net: Net, loss: Tensor, factor: float) -> dict[str, Tensor]:
        """The loss plus factor · that of the routers, and what a report needs; {} without these."""
        if not net.routings:
            return {}
        load = expert_load(net.routings, self.share)
        balance = balance_loss(net.routings, self.share, load)
        if factor:
            loss = add(loss, mul(scale(balance, factor), self.weight))
        return {"loss": loss, LOAD: load, BALANCE: balance}

    def write(self, batch: WindowBatch) -> None:
        starts, document = np.unique(batch.span[:, 0], return_inverse=True)
        is_text = (np.bincount(document, minlength=len(starts)) > 1)[document]
        write(self.share, (is_text / max(int(is_text.sum()), 1)).astype(np.float32))
        write(self.weight, np.float32(batch.weight))


@dataclass(frozen=True, slots=True, eq=False)
class ExpertReport:
    """The load of a mixture's experts over some batches.

    load      (layers, experts) float64, as a multiple of that where all are loaded alike
    balance   the balance loss; as many as each token has experts where all are loaded alike
    """

    load: np.ndarray
    balance: float

    @classmethod
    def of(cls, numbers: np.ndarray, n_layers: int) -> ExpertReport:
        """numbers: the shares of the tokens that each expert computes, then the balance loss."""
        load = numbers[:-1].reshape(n_layers, -1)
        return cls(load / np.maximum(load.mean(axis=1, keepdims=True), 1e-30), float(numbers[-1]))

    @property
    def busiest(self) -> float:
        """The greatest load."""
        return float(self.load.max())

    @property
    def n_idle(self) -> int:
        """Experts that no token chose."""
        return int(np.count_nonzero(self.load == 0))

    def figures(self, whole: bool) -> dict[str, Any]:
        """What a record holds; with `whole`, each expert's load too."""
        sums = {"balance_loss": self.balance, "busiest": self.busiest, "idle": self.n_idle}
        return sums | ({"load": np.round(self.load, 3).tolist()} if whole else {})

    @property
    def words(self) -> str:
        """The same on a terminal."""
        idle = f", {self.n_idle:,} of {self.load.size:,} idle" if self.n_idle else ""
        return f"busiest expert {self.busiest:.1f} × its share{idle}"
