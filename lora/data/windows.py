"""Documents → token windows → batches.

A window is ctx + 1 tokens: ctx inputs, each with its next token as target; windows do not overlap.
Documents lie one after the other in the windows, but no token attends to another document or is its
target. A batch is windows one after the other in one row of tokens; `span` keeps them apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """T = windows · ctx tokens as `pyggml.models.Inputs` wants them.

    tokens, positions, targets (T,) int32, span (T, 2) int32; weights (T,) float32 are 1 / number of
    trained tokens of the whole step, or 0 where the next token is none of this document.
    """

    tokens: np.ndarray
    positions: np.ndarray
    span: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Windows: `tokens` and the number of the document of each, both (n, ctx + 1) int32.

    A window that is not full ends in tokens that are documents of their own: they have no target.
    """

    tokens: np.ndarray
    documents: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def ctx(self) -> int:
        return int(self.tokens.shape[1]) - 1

    def part(self, which: slice | np.ndarray) -> Dataset:
        """Some of the windows."""
        return Dataset(self.tokens[which], self.documents[which])

    def n_targets(self, windows: Sequence[int] | np.ndarray | None = None) -> int:
        """Trained tokens of these windows, or of all."""
        if windows is None:
            return int(np.count_nonzero(_is_target(self.documents)))
        return int(np.count_nonzero(_is_target(self.documents[windows])))

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """The windows in the order in which this epoch reads them, a function of nothing else."""
        return np.random.default_rng([seed, epoch]).permutation(len(self))

    def batches(self, windows: Sequence[int] | np.ndarray, size: int) -> Iterator[Batch]:
        """The batches of one step over these windows, `size` in each; the last is filled up.

        A window that only fills up has weight 0 throughout.
        """
        total = max(self.n_targets(windows), 1)
        for first in range(0, len(windows), size):
            yield self._batch(windows[first : first + size], size, total)

    def _batch(self, windows: Sequence[int] | np.ndarray, size: int, total: int) -> Batch:
        tokens = np.zeros((size, self.ctx + 1), np.int32)
        documents = np.tile(_no_documents(self.ctx + 1), (size, 1))
        tokens[: len(windows)] = self.tokens[windows]
        documents[: len(windows)] = self.documents[windows]
        column = np.arange(self.ctx, dtype=np.int32)
        is_first = np.diff(documents[:, :-1], axis=1, prepend=documents[:, :1] - 1) != 0
        start = np.maximum.accumulate(np.where(is_first, column, 0), axis=1)
        row = np.arange(size, dtype=np.int32)[:, None] * self.ctx
        span = np.stack([row + start, np.broadcast_to(row + column + 1, start.shape)], axis=-1)
        return Batch(
            tokens=tokens[:, :-1].reshape(-1),
            positions=(column - start).reshape(-1).astype(np.int32),
            span=span.reshape(-1, 2).astype(np.int32),
            targets=tokens[:, 1:].reshape(-1),
            weights=_is_target(documents).reshape(-1).astype(np.float32) / np.float32(total),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """What is trained on, and what is held out (None if nothing is), of so many documents."""

    train: Dataset
    validation: Dataset | None
    n_documents: int = 1
    n_held_out: int = 0  # documents; of a single one, windows are

    def digest(self) -> str:
        """SHA-256 of every window: two runs with the same digest read the same numbers."""
        digest = hashlib.sha256()
        for part in (self.train, self.validation):
            for array in (part.tokens, part.documents) if part else ():
                digest.update(repr(array.shape).encode() + array.tobytes())
        return digest.hexdigest()


def _is_target(documents: np.ndarray) -> np.ndarray:
    """(n, ctx + 1) -> (n, ctx): whether the next token is of the same document."""
    return np.asarray(documents[:, 1:] == documents[:, :-1])


def _no_documents(n: int) -> np.ndarray:
    """Numbers of n documents of one token, all different: what fills up a window."""
    return -1 - np.arange(n, dtype=np.int32)


def pack(documents: Sequence[Sequence[int]], ctx: int) -> Dataset:
    """Documents one after the other, cut into windows; those without any target are left out."""
    n = sum(len(d) for d in documents)
    width, n_fill = ctx + 1, -n % (ctx + 1)
    tokens, owner = np.zeros(n + n_fill, np.int32), np.zeros(n + n_fill, np.int32)
    first = 0
    for number, document in enumerate(documents):
        tokens[first : first + len(document)] = document
        owner[first : first + len(document)] = number
        first += len(document)
    owner[n:] = _no_documents(n_fill)
    packed = Dataset(tokens.reshape(-1, width), owner.reshape(-1, width))
    return packed.part(np.flatnonzero(_is_target(packed.documents).any(axis=1)))
