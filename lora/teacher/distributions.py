"""Probabilities of k tokens, and of all others together, at the learned positions of a window.

The k tokens are the likeliest ones, but the first is the token that stands there: if it is none of
them it takes the place of the least likely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pyggml.graph import Graph
from pyggml.lora.data import Dataset
from pyggml.runtime import Program


@dataclass(frozen=True, slots=True, eq=False)
class Distributions:
    """Those at n positions.

    ids         (n, k) int32, all different in a row
    log_probs   (n, k + 1) float32, of these, then of all other tokens together; −∞ for none
    """

    ids: np.ndarray
    log_probs: np.ndarray

    @classmethod
    def of(
        cls,
        likeliest: tuple[np.ndarray, np.ndarray],
        present: tuple[np.ndarray, np.ndarray],
        has_others: bool,
    ) -> Distributions:
        """The likeliest tokens and their probabilities, (n, k) each; the tokens that stand there
        and theirs, (n,) each; whether there are further tokens."""
        (ids, probs), (targets, p_targets) = likeliest, present
        ids, probs, rows = ids.copy(), probs.copy(), np.arange(len(ids))
        is_target = ids == targets[:, None]
        at = np.where(is_target.any(axis=1), is_target.argmax(axis=1), ids.shape[1] - 1)
        ids[rows, at], probs[rows, at] = ids[:, 0], probs[:, 0]
        ids[:, 0], probs[:, 0] = targets, p_targets
        rest = np.maximum(1 - probs.sum(axis=1, dtype=np.float64), 0) * has_others
        with np.errstate(divide="ignore"):
            return cls(ids, np.log(np.column_stack([probs, rest])).astype(np.float32))

    def shares(self) -> np.ndarray:
        """(n, k + 1) float64: the probabilities, which add up to 1."""
        p = np.exp(self.log_probs.astype(np.float64))
        return np.asarray(p / p.sum(axis=1, keepdims=True))


class Teacher(Protocol):
    """A source of distributions.

    graphs   graphs that it runs, in the memory of the run
    k        tokens of each distribution
    """

    @property
    def graphs(self) -> Sequence[Graph]: ...

    @property
    def k(self) -> int: ...

    def distributions(
        self, programs: Sequence[Program], data: Dataset, window: int
    ) -> Distributions:
        """Those at the targets of a window, in their order. programs: `graphs`, bound."""
