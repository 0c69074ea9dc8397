"""Rows of texts that are compared → windows of whole groups: anchor, positive, negatives.

Each text ends in a mark, which no text reads: ANCHOR, POSITIVE or NEGATIVE in a token's place.
While files are read a group is one document, so that its texts stay together; then each text is
one, and of all marks those of anchors are learned, so that a window counts by its groups.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyggml.chat.messages import BadValue
from pyggml.errors import DataError
from pyggml.lora.data.reading.sources import FileSummary
from pyggml.lora.data.records.rows import GroupRow, Row
from pyggml.lora.data.texts import TextReader
from pyggml.lora.data.tokens.documents import Document, Documents
from pyggml.lora.data.tokens.long_text import whole
from pyggml.lora.data.windows.batches import READS, Dataset, FileWindows

ANCHOR, POSITIVE, NEGATIVE = 0, 1, 2


class GroupReader(TextReader):
    """Reads rows of texts that are compared into windows."""

    text_lacks = "compares nothing"

    def encode_row(self, row: Row) -> Sequence[Document]:
        assert isinstance(row, GroupRow)
        texts = [(row.anchor, ANCHOR), (row.positive, POSITIVE)]
        texts += [(text, NEGATIVE) for text in row.negatives]
        parse = self.encoding.parses(plain=False)
        encoded = [(whole(text, self.tokenizer, parse), mark) for text, mark in texts]
        if not all(ids for ids, _ in encoded):
            raise BadValue("has a text without a token of the vocabulary")
        marks = [np.arange(len(ids) + 1) == len(ids) for ids, _ in encoded]
        return [Document([t for ids, mark in encoded for t in (*ids, mark)], np.concatenate(marks))]

    def fit(self, documents: Documents) -> tuple[Documents, int]:
        """Texts of a group that is too long are cut to the same length."""
        if self.config.long_chats != "truncate":
            return super().fit(documents)
        trained, width = documents.trained, self.ctx + 1
        assert trained is not None

        def cut_to_width(at: np.ndarray) -> np.ndarray:
            ends = np.flatnonzero(trained[at])
            most = len(at) if len(at) <= width else width // len(ends) - 1
            if most < 1:
                raise DataError(f"a group has {len(ends)} texts, too many for --ctx {self.ctx}")
            starts = np.r_[0, ends[:-1] + 1]
            parts = [np.r_[s : min(s + most, e), e] for s, e in zip(starts, ends, strict=True)]
            return at[np.concatenate(parts)]

        return documents.cut(cut_to_width, self.folder), int((documents.lengths > width).sum())

    def arranged(
        self, train: Dataset, validation: Dataset, parts: Sequence[FileWindows]
    ) -> tuple[Dataset, Dataset]:
        train, validation = super().arranged(train, validation, parts)
        return by_text(train), by_text(validation)

    def about(self, files: Iterable[FileSummary]) -> dict[str, Any]:
        return {**super().about(files), READS: self.schema.purpose}


@dataclass(frozen=True, eq=False)
class Groups(Dataset):
    """Windows of whole groups, of which no part is read alone."""


def by_text(data: Dataset) -> Dataset:
    """Windows of groups with a document for each text, of which the anchors' marks are learned."""
    if data.trained is None:
        return data
    is_mark = data.trained & (data.documents >= 0)
    starts = np.zeros(is_mark.shape, np.int64)
    starts[:, 1:] = is_mark[:, :-1]
    number = starts.reshape(-1).cumsum().reshape(is_mark.shape) + np.arange(len(data))[:, None]
    documents = np.where(data.documents >= 0, number, data.documents).astype(np.int32)
    learned = is_mark & (data.tokens == ANCHOR)
    return Groups(data.tokens, documents, learned, data.repeats, data.lengths)
