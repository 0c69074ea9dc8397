"""Documents → token windows → batches.

A window is ctx + 1 tokens: ctx inputs, each with its next token as target; windows do not overlap.
Documents lie one after the other in the windows, but no token attends to another document or is its
target. A batch is windows one after the other in one row of tokens; `span` keeps them apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """Token ids, and whether each is learned where it is a target; None is all."""

    ids: Sequence[int]
    trained: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)


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
    trained: (n, ctx + 1) bool, whether each token is learned where it is a target; None is all.
    """

    tokens: np.ndarray
    documents: np.ndarray
    trained: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def ctx(self) -> int:
        return int(self.tokens.shape[1]) - 1

    def part(self, which: slice | np.ndarray) -> Dataset:
        """Some of the windows."""
        trained = None if self.trained is None else self.trained[which]
        return Dataset(self.tokens[which], self.documents[which], trained)

    def targets(self) -> np.ndarray:
        """(n, ctx) bool: where the next token is of the same document, and learned."""
        same = np.asarray(self.documents[:, 1:] == self.documents[:, :-1])
        return same if self.trained is None else same & self.trained[:, 1:]

    def n_targets(self, windows: Sequence[int] | np.ndarray | None = None) -> int:
        """Trained tokens of these windows, or of all."""
        part = self if windows is None else self.part(np.asarray(windows, np.int64))
        return int(np.count_nonzero(part.targets()))

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
        some = self.part(np.asarray(windows, np.int64))
        tokens = np.zeros((size, self.ctx + 1), np.int32)
        documents = np.tile(_no_documents(self.ctx + 1), (size, 1))
        weights = np.zeros((size, self.ctx), np.float32)
        tokens[: len(windows)] = some.tokens
        documents[: len(windows)] = some.documents
        weights[: len(windows)] = some.targets() / np.float32(total)
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
            weights=weights.reshape(-1),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """What is trained on, and what is held out (None if nothing is), of so many documents.

    kind: the format of the file they are from, see `pyggml.lora.data.files`.
    about: settings that made them, which a resumed run must share.
    """

    train: Dataset
    validation: Dataset | None
    n_documents: int = 1
    n_held_out: int = 0  # documents; of a single one, windows are
    kind: str = "text"
    about: Mapping[str, Any] = field(default_factory=dict)

    def digest(self) -> str:
        """SHA-256 of every window: two runs with the same digest read the same numbers."""
        digest = hashlib.sha256()
        for part in (self.train, self.validation):
            for array in (part.tokens, part.documents, part.trained) if part else ():
                if array is not None:
                    digest.update(repr(array.shape).encode() + array.tobytes())
        return digest.hexdigest()


def _no_documents(n: int) -> np.ndarray:
    """Numbers of n documents of one token, all different: what fills up a window."""
    return -1 - np.arange(n, dtype=np.int32)


def pack(documents: Sequence[Document], ctx: int, whole: bool = False) -> Dataset:
    """Documents one after the other, cut into windows; those without any target are left out.

    whole: no document goes on in the next window; each has at most ctx + 1 tokens.
    """
    width, n = ctx + 1, 0
    starts = []
    for document in documents:
        room = -n % width or width  # in the window under way
        n += room if whole and len(document) > room else 0
        starts.append(n)
        n += len(document)
    n += -n % width
    tokens, owner, trained = np.zeros(n, np.int32), _no_documents(n), np.ones(n, np.bool_)
    for number, (first, document) in enumerate(zip(starts, documents, strict=True)):
        span = slice(first, first + len(document))
        tokens[span], owner[span] = document.ids, number
        trained[span] = True if document.trained is None else document.trained
    masked = any(d.trained is not None for d in documents)
    found = Dataset(
        tokens.reshape(-1, width),
        owner.reshape(-1, width),
        trained.reshape(-1, width) if masked else None,
    )
    return found.part(np.flatnonzero(found.targets().any(axis=1)))
