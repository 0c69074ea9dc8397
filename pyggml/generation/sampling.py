"""How a token is taken from logits: the settings, and the draw."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyggml.errors import ConfigError, DataError, Fault


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample a token.

    temperature   0 to 100; 0 takes the likeliest token
    top_k         sample from the k likeliest tokens; 0 for all
    top_p         sample from the likeliest tokens with this sum of probabilities; 1 for all
    seed          of the random generator

    Raises ConfigError for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        faults: list[Fault] = []
        if not 0 <= self.temperature <= 100:
            faults.append(("temperature", f"is {self.temperature}, wanted 0 to 100"))
        if self.top_k < 0:
            faults.append(("top_k", f"is {self.top_k}, wanted 0 or more"))
        if not 0 < self.top_p <= 1:
            faults.append(("top_p", f"is {self.top_p}, wanted above 0 and at most 1"))
        if self.seed < 0:
            faults.append(("seed", f"is {self.seed}, wanted 0 or more"))
        if faults:
            raise ConfigError(faults)


def sample(logits: np.ndarray, how: Sampling, rng: np.random.Generator) -> int:
    """One token id from logits (n_vocab,). Tokens with logit -inf are never sampled.

    Raises DataError if the greatest logit is NaN or infinite.
    """
    if not np.isfinite(greatest := logits.max()):
        raise DataError(
            f"the greatest logit is {greatest}, wanted a finite number: the model's "
            "weights or its adapter make no numbers"
        )
    if how.temperature == 0:
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")[: how.top_k or None]
    z = logits[order].astype(np.float64)
    with np.errstate(over="ignore"):  # near temperature 0 all but the likeliest become -inf
        p = np.exp((z - z[0]) / how.temperature)
    p /= p.sum()
    kept = int(np.searchsorted(np.cumsum(p), how.top_p)) + 1
    p = p[:kept] / p[:kept].sum()
    return int(order[rng.choice(len(p), p=p)])
