"""Which classes were taken for which: accuracy, precision, recall, F1."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Confusion:
    """counts (n, n) int64: texts of the class of the row that were taken for that of the column."""

    counts: np.ndarray

    @classmethod
    def of(cls, answers: np.ndarray, guesses: np.ndarray, n: int) -> "Confusion":
        """answers, guesses: the class of each text, (m,) integers from 0 to n - 1."""
        return cls(np.bincount(answers * n + guesses, minlength=n * n).reshape(n, n))

    @property
    def accuracy(self) -> float:
        """The share that is right, 0 to 1; 0 without any."""
        return float(np.trace(self.counts) / max(self.counts.sum(), 1))

    @property
    def precision(self) -> np.ndarray:
        """(n,) of what was taken for a class, the share that is of it; 0 where nothing was."""
        return np.diag(self.counts) / np.maximum(self.counts.sum(axis=0), 1)

    @property
    def recall(self) -> np.ndarray:
        """(n,) of a class, the share that was found; 0 where there is none of it."""
        return np.diag(self.counts) / np.maximum(self.counts.sum(axis=1), 1)

    @property
    def f1(self) -> np.ndarray:
        """(n,) 2 · right / (taken + there), 0 where both are 0."""
        both = self.counts.sum(axis=0) + self.counts.sum(axis=1)
        return 2 * np.diag(self.counts) / np.maximum(both, 1)

    @property
    def macro_f1(self) -> float:
        """The mean F1 of the classes that are there or were guessed, as scikit-learn counts it."""
        is_there = self.counts.sum(axis=0) + self.counts.sum(axis=1) > 0
        return float(self.f1[is_there].mean()) if is_there.any() else 0.0
