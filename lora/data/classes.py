"""Rows of texts and labels → windows, of whose tokens one for each row is learned: its label's.

A label has a token of the vocabulary, so that an adapter that was trained loads anywhere, and what
it says next after a text is the label: the first of the label's tokens that no other label has, as
" negative" of "very negative" beside "very positive". Where a label has none, it is a letter.

A row's document is its text's tokens and its label's. Once all rows are read, the label's first
token becomes the label's own; those after it are no part of the document any more.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pyggml.chat.messages import BadValue
from pyggml.errors import DataError, first_names
from pyggml.lora.data.labels import MOST_LABELS, Labels
from pyggml.lora.data.reading.sources import FileSummary
from pyggml.lora.data.records.rows import ClassRow, Row
from pyggml.lora.data.texts import TextReader
from pyggml.lora.data.tokens.documents import Document, Documents
from pyggml.lora.data.tokens.encode import Encoding
from pyggml.lora.data.tokens.long_text import whole
from pyggml.lora.data.windows.batches import READS, Dataset, FileWindows, no_documents
from pyggml.models.stack import LABELS
from pyggml.tokenizer import Tokenizer

Ids = tuple[int, ...]


def encode_class(row: ClassRow, tokenizer: Tokenizer, encoding: Encoding) -> Document:
    """The tokens of a text and of its label, which are learned. BadValue for a text of none."""
    text = whole(row.text, tokenizer, encoding.parses(plain=False))
    label = tokenizer.encode(f" {row.label}", add_special=False)
    if not text or not label:
        raise BadValue(f"has a {'label' if text else 'text'} without a token of the vocabulary")
    return Document([*text, *label], np.arange(len(text) + len(label)) >= len(text))


class ClassReader(TextReader):
    """Reads rows of texts and labels into windows."""

    text_lacks = "has no labels"

    def encode_row(self, row: Row) -> Sequence[Document]:
        assert isinstance(row, ClassRow)
        return [encode_class(row, self.tokenizer, self.encoding)]

    def fit(self, documents: Documents) -> tuple[Documents, int]:
        """A text that is cut keeps its label."""
        if self.config.long_chats != "truncate":
            return super().fit(documents)
        trained, width = documents.trained, self.ctx + 1
        assert trained is not None

        def cut_to_width(at: np.ndarray) -> np.ndarray:
            label = at[len(at) - int(trained[at].sum()) :]
            return np.r_[at[: min(len(at), width) - len(label)], label]

        return documents.cut(cut_to_width, self.folder), int((documents.lengths > width).sum())

    def arranged(
        self, train: Dataset, validation: Dataset, parts: Sequence[FileWindows]
    ) -> tuple[Dataset, Dataset]:
        ours = [words_of(side) for part in parts for side in (part.train, part.validation)]
        words = {self._name(ids): ids for ids in {ids for classes in ours for _, _, ids in classes}}
        unseen = {self._name(ids) for _, _, ids in words_of(validation)} - {*words}
        if unseen:
            names = first_names(sorted(unseen))
            raise DataError(f"held out are rows of the labels {names}, which no other row has")
        if not 2 <= len(words) <= MOST_LABELS:
            there = f"{len(words)} labels"
            if len(words) == 1:
                there = f"all rows have the label {next(iter(words))!r}"
            raise DataError(f"{there}, wanted 2 to {MOST_LABELS} labels")
        self.labels = Labels.choose(words, self.tokenizer)
        sides = [self._with_own_tokens(side) for side in (train, validation)]
        return super().arranged(sides[0], sides[1], parts)

    def about(self, files: Iterable[FileSummary]) -> dict[str, Any]:
        return {**super().about(files), READS: self.schema.purpose, LABELS: self.labels.text()}

    def _name(self, ids: Ids) -> str:
        return self.tokenizer.decode(ids).strip()

    def _with_own_tokens(self, data: Dataset) -> Dataset:
        """Each label as its one token."""
        tokens, documents = np.array(data.tokens), np.array(data.documents)
        trained = np.zeros(tokens.shape, np.bool_)
        for row, at, ids in words_of(data):
            tokens[row, at], trained[row, at] = self.labels.tokens[self._name(ids)], True
            rest = slice(at + 1, at + len(ids))
            documents[row, rest] = no_documents(tokens.shape[1])[rest]
        return replace(data, tokens=tokens, documents=documents, trained=trained)


def words_of(data: Dataset) -> Iterator[tuple[int, int, Ids]]:
    """Of each label its window, its first token's place there, and its tokens."""
    if data.trained is None:
        return
    for row, learned in enumerate(data.trained):
        of = np.where(data.documents[row] >= 0, learned, False)
        documents = data.documents[row]
        at = np.flatnonzero(of)
        for places in np.split(at, np.flatnonzero(np.diff(documents[at])) + 1) if len(at) else ():
            yield row, int(places[0]), tuple(data.tokens[row, places].tolist())
