"""Documents of tokens: single ones, made from rows, and all of a file in a few long arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pyggml.lora.data.records.rows import RowPlace
from pyggml.lora.data.tokens.spill import BLOCK, GrowingArray, blocks

Notes = Mapping[str, tuple[int, str]]  # a note of `Document` -> of how many, and the first's place


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """Token ids, and whether each is learned as a target; None: all are.

    trained: bool, or float32 0 to 1 where a token weighs less than others in the loss
    notes: remarks on it for the user, see `pyggml.lora.data.tokens.chats`
    """

    ids: Sequence[int]
    trained: np.ndarray | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """n documents, with their tokens in long arrays, in memory or mapped from a file.

    ids       (n_tokens,) int32
    starts    (n,) int64, the start of each document in `ids`
    lengths   (n,) int64
    trained   (n_tokens,) bool, whether each token is learned as a target; None: all are; float32
              0 to 1 where some weigh less than others
    places    (n, 2) int64, number and end of each `RowPlace`; None if no place is ever named
    """

    ids: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    trained: np.ndarray | None = None
    places: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def n_tokens(self) -> int:
        return int(self.lengths.sum())

    def part(self, which: np.ndarray) -> Documents:
        """Some of the documents; their tokens are not copied."""
        places = None if self.places is None else self.places[which]
        return Documents(self.ids, self.starts[which], self.lengths[which], self.trained, places)

    def shorten(self, lengths: np.ndarray) -> Documents:
        """The first tokens of each document; nothing is copied."""
        return Documents(self.ids, self.starts, lengths, self.trained, self.places)

    def are_learned(self) -> np.ndarray:
        """(n,) bool: whether a token behind the first of each document is learned."""
        if self.trained is None:
            return np.asarray(self.lengths > 1)
        ends = zip((self.starts + 1).tolist(), (self.starts + self.lengths).tolist(), strict=True)
        return np.array([bool(self.trained[a:b].any()) for a, b in ends], np.bool_)

    def pieces(self, ctx: int) -> Documents:
        """Documents of at most ctx + 1 tokens: longer ones in pieces, the last token of one piece
        the first of the next, so that every token but a document's first is a target once."""
        n = np.maximum(-(-(self.lengths - 1) // ctx), 1)
        if (n == 1).all():
            return self
        number = np.repeat(np.arange(len(self)), n)
        before = (np.arange(len(number)) - np.repeat(np.cumsum(n) - n, n)) * ctx
        part = self.part(number)
        lengths = np.minimum(part.lengths - before, ctx + 1)
        return Documents(part.ids, part.starts + before, lengths, part.trained, part.places)

    def cut(self, kept: Callable[[np.ndarray], np.ndarray], folder: Path | None) -> Documents:
        """Documents of some of the tokens of each: those that are kept of its places in `ids`."""
        writer, trained = Writer(folder), self.trained
        for first, n in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            at = kept(np.arange(first, first + n))
            writer.add(Document(self.ids[at].tolist(), None if trained is None else trained[at]))
        return replace(writer.documents(), places=self.places)

    @staticmethod
    def of(documents: Iterable[Document], folder: Path | None = None) -> Documents:
        """Documents one after the other; `folder` is where large arrays lie."""
        writer = Writer(folder)
        for document in documents:
            writer.add(document)
        return writer.documents()


class Writer:
    """Collects documents one by one into `Documents`."""

    def __init__(self, folder: Path | None) -> None:
        self._ids, self._trained = GrowingArray(np.int32, folder), GrowingArray(np.bool_, folder)
        self._lengths, self._places = GrowingArray(np.int64, folder), GrowingArray(np.int64, folder)
        self._masked, self._weighted, self._folder = False, False, folder

    def add(self, document: Document, place: RowPlace | None = None) -> None:
        """One more document."""
        self._mark(len(document), document.trained)
        self._ids.extend(document.ids)
        self._end(len(document), place)

    def add_parts(self, parts: Iterator[Sequence[int]]) -> None:
        """Add a document, all of it learned, from parts of its tokens."""
        n = 0
        for ids in parts:
            self._mark(len(ids), None)
            self._ids.extend(ids)
            n += len(ids)
        self._end(n, None)

    def _mark(self, n: int, trained: np.ndarray | None) -> None:
        """What of the next n tokens is learned; nothing is kept while all are."""
        if trained is not None and not self._masked:
            self._masked = True
            for first in range(0, self._ids.n, BLOCK):
                self._trained.extend(np.ones(min(BLOCK, self._ids.n - first), np.bool_))
        if trained is not None and trained.dtype != np.bool_ and not self._weighted:
            self._weighted, flags = True, self._trained.finish()
            self._trained = GrowingArray(np.float32, self._folder)
            for block in blocks(flags):
                self._trained.extend(block)
        if self._masked:
            self._trained.extend(np.ones(n, np.bool_) if trained is None else trained)

    def _end(self, n: int, place: RowPlace | None) -> None:
        self._lengths.extend((n,))
        if place is not None:
            self._places.extend((place.number, place.end))

    def documents(self) -> Documents:
        """All documents added; call it once, at the end."""
        lengths, places = self._lengths.finish(), self._places.finish()
        return Documents(
            self._ids.finish(),
            np.cumsum(lengths) - lengths,
            lengths,
            self._trained.finish() if self._masked else None,
            places.reshape(-1, 2) if len(places) == 2 * len(lengths) else None,
        )
