"""What packing loses: how much of an update is in the blocks that are written, and how far they are
from the numbers that were meant.

share    Σ D·U / Σ U² of what was written D = Q − W₀, and what was meant U = W − W₀: 1 if all of the
         update is there, 0 if none
error    √(Σ (Q − W)² / Σ W²) of the blocks Q that were written
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pyggml.graph.dtypes import DType
from pyggml.quants import dequantize, quantize

LEAST_SHARE = 0.8  # of an update; below it there is a warning
_KEEPERS = ("Q8_0", "F16", "F32")  # types to advise, the smallest first
_PIECE = 1 << 14  # numbers that are compared at a time


class Sums(NamedTuple):
    """Sums over numbers of a model, in float64.

    update, written   Σ U², Σ D·U; both 0 without an update
    errors, weights   Σ (Q − W)², Σ W²
    """

    update: float
    written: float
    errors: float
    weights: float

    @property
    def share(self) -> float | None:
        """How much of the update was written; None if there is none."""
        return self.written / self.update if self.update else None

    @property
    def error(self) -> float:
        return float(np.sqrt(self.errors / self.weights)) if self.weights else 0.0


@dataclass(frozen=True, slots=True)
class TensorLoss:
    """The sums of one tensor, the type it has now, and a type that keeps the update where this one
    does not."""

    name: str
    dtype: DType
    sums: Sums
    better: str | None = None


@dataclass(frozen=True, slots=True)
class PackingLosses:
    """What was lost of each tensor that was updated or got another type, in the file's order."""

    tensors: Sequence[TensorLoss]

    @property
    def updated(self) -> list[TensorLoss]:
        return [t for t in self.tensors if t.sums.update]

    @property
    def sums(self) -> Sums:
        """Those over all tensors."""
        return Sums(*map(sum, zip(*(t.sums for t in self.tensors), strict=True)))

    @property
    def better(self) -> str | None:
        """The type that keeps the update of every tensor that lost it."""
        return max((t.better for t in self.tensors if t.better), key=_KEEPERS.index, default=None)

    @property
    def least(self) -> TensorLoss:
        """The tensor whose update is written least."""
        return min(self.updated, key=lambda t: t.sums.share or 0.0)

    @property
    def worst(self) -> TensorLoss:
        """The tensor whose numbers are furthest from what was meant."""
        return max(self.tensors, key=lambda t: t.sums.error)

    @property
    def is_lost(self) -> bool:
        """Whether so little of an update is in the file that a user should know."""
        return bool(self.updated) and (self.least.sums.share or 0.0) < LEAST_SHARE


def measure(
    name: str, dtype: DType, meant: np.ndarray, raw: np.ndarray, before: np.ndarray | None
) -> TensorLoss:
    """The losses of one tensor: of the numbers that were meant, float32, the blocks that hold them,
    and the numbers before the update, if there is one."""
    if dtype.name == "F32":  # exact
        raw = meant
    sums = _sums(dtype.name, meant, raw, before)
    if sums.share is None or sums.share >= LEAST_SHARE:
        return TensorLoss(name, dtype, sums)
    for better in _KEEPERS:
        share = _sums(better, meant, quantize(meant, better), before).share
        if share is None or share >= LEAST_SHARE:
            break
    return TensorLoss(name, dtype, sums, better)


def _sums(to: str, meant: np.ndarray, raw: np.ndarray, before: np.ndarray | None) -> Sums:
    """By rows, so that little is in memory."""
    n = meant.shape[-1]
    w, q = meant.reshape(-1, n), raw.reshape(meant.size // n, -1)
    old = w if before is None else before.reshape(-1, n)
    totals, step = np.zeros(4), max(_PIECE // n, 1)
    for first in range(0, len(w), step):
        rows = slice(first, first + step)
        x = q[rows] if raw is meant else dequantize(q[rows], to)
        u, off = w[rows] - old[rows], x - w[rows]
        pairs = ((u, u), (off, u), (off, off), (w[rows], w[rows]))
        totals += [float(np.sum(a * b, dtype=np.float64)) for a, b in pairs]
    totals[1] += totals[0]  # D·U = U² + (Q − W)·U
    return Sums(*totals.tolist())
