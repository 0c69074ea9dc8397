"""The losses of preference training, as TRL defines them, on the log-probabilities of answers.

log p = Σ over an answer's tokens of ln softmax(logits)[token], given its prompt and what stands
before; σ is the sigmoid, ŷ the reference, β > 0 the strength.

dpo    −ln σ(x), x = β·((log p_chosen − log p̂_chosen) − (log p_rejected − log p̂_rejected));
       with label smoothing ε: −(1 − ε)·ln σ(x) − ε·ln σ(−x)                  (Rafailov et al. 2023)
orpo   NLL(prompt and chosen) − β·ln σ(odds(chosen) − odds(rejected)), odds(a) = a − ln(1 − e^a)
       of the mean log-probability a of an answer's tokens; no reference          (Hong et al. 2024)
kto    1 − σ(±β·(log p − log p̂ − KL)), + for wanted answers, − for others; KL ≥ 0 is the mean of
       log p − log p̂ over mismatched answers, and a constant           (Ethayarajh et al. 2024)

A step's loss is the mean over its pairs (of KTO: its answers); the NLL is the mean over its tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from pyggml.backends.cpu import write
from pyggml.graph import Graph
from pyggml.graph.dtypes import F32, I32
from pyggml.graph.tensor import Tensor, put_together, zeros
from pyggml.lora.config import PreferenceConfig
from pyggml.lora.objectives.answers import AnswerBatch
from pyggml.model import Model
from pyggml.models import Inputs, Net, Taps, token_losses
from pyggml.ops import (
    add,
    clamp,
    expm1,
    log,
    mul,
    mul_mat,
    neg,
    reshape,
    scale,
    sigmoid,
    softplus,
    split,
    sub,
    sum_,
)

_CERTAIN = -1e-7  # the highest mean log-probability whose odds are finite in float32


@dataclass(frozen=True, slots=True)
class Leaves:
    """The leaves of a batch of T tokens and S answers; AnswerBatch explains each."""

    targets: Tensor  # (T,) int32
    read: Tensor  # (T,)
    members: Tensor  # (S, T)
    nll: Tensor  # (T,)
    reference: Tensor  # (S,)
    sign: Tensor  # (S,)
    share: Tensor  # (S,)

    @classmethod
    def empty(cls, n_tokens: int, n_answers: int) -> Leaves:
        t, s = (n_tokens,), (n_answers,)
        leaves = (
            zeros(t, I32, "targets"),
            zeros(t, F32, "read tokens"),
            zeros((*s, *t), F32, "tokens of answers"),
            zeros(t, F32, "weights of the NLL"),
            zeros(s, F32, "reference"),
            zeros(s, F32, "sign"),
            zeros(s, F32, "share"),
        )
        put_together(*leaves)
        return cls(*leaves)

    def write(self, batch: AnswerBatch) -> None:
        for name in self.__slots__:
            write(getattr(self, name), getattr(batch, name))


def log_probs(
    model: Model,
    inputs: Inputs,
    leaves: Leaves,
    trained: Collection[str] = (),
    gradient: bool = True,
    taps: Taps | None = None,
) -> tuple[Net, Tensor, Tensor]:
    """The net, the cross entropy of every token (T,), and the log-probability of every answer (S,):
    sums, or means where `members` says so."""
    net = Net(model.parts.weights, inputs, model.adapters, taps=taps)
    losses = token_losses(model.parts, net, leaves.targets, leaves.read, trained, gradient)
    found = neg(mul_mat(leaves.members, reshape(losses, (1, -1))))
    return net, losses, reshape(found, (-1,)).named("log-probabilities")


class PreferenceLoss:
    """The loss of a batch of answers; its further result is their log-probabilities (S,)."""

    def __init__(self, config: PreferenceConfig, n_tokens: int, n_answers: int) -> None:
        self.config, self.leaves = config, Leaves.empty(n_tokens, n_answers)

    def build(
        self,
        model: Model,
        inputs: Inputs,
        trained: Collection[str],
        gradient: bool,
        taps: Taps | None = None,
    ) -> Graph:
        net, losses, found = log_probs(model, inputs, self.leaves, trained, gradient, taps)
        if self.config.objective == "kto":
            loss = _kto(found, self.leaves, self.config.beta)
        elif self.config.objective == "orpo":
            nll = sum_(mul(losses, self.leaves.nll))
            loss = add(nll, _odds_ratio(found, self.leaves, self.config.beta))
        else:
            loss = _dpo(found, self.leaves, self.config.beta, self.config.label_smoothing)
        return net.graph(loss=loss.named("loss"), log_probs=found)

    def write(self, batch: AnswerBatch) -> None:
        self.leaves.write(batch)


def _pairs(of_answers: Tensor) -> tuple[Tensor, ...]:
    """The values of the chosen answers, and of the rejected: (P, 1) each."""
    return split(reshape(of_answers, (-1, 2)), (1, 1), axis=1)


def _dpo(found: Tensor, leaves: Leaves, beta: float, smoothing: float) -> Tensor:
    chosen, rejected = _pairs(sub(found, leaves.reference))
    x = scale(sub(chosen, rejected), beta)
    loss = softplus(neg(x))
    if smoothing:  # −ln σ(−x) = x − ln σ(x)
        loss = add(loss, scale(x, smoothing))
    return sum_(mul(loss, _pairs(leaves.share)[0]))


def _odds_ratio(found: Tensor, leaves: Leaves, beta: float) -> Tensor:
    at_most = clamp(found, -np.inf, _CERTAIN)
    chosen, rejected = _pairs(sub(at_most, log(neg(expm1(at_most)))))
    ratio = softplus(neg(sub(chosen, rejected)))
    return scale(sum_(mul(ratio, _pairs(leaves.share)[0])), beta)


def _kto(found: Tensor, leaves: Leaves, beta: float) -> Tensor:
    """1 − σ(x), computed as σ(−x); the reference includes the KL."""
    found = mul(leaves.sign, sub(found, leaves.reference))
    return sum_(mul(sigmoid(scale(found, -beta)), leaves.share))
