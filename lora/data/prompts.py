"""Files of prompts → a window for each, those to train on and those held out.

Each prompt stands alone in its window, with its row, by which answers are judged.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pyggml.chat.messages import BadValue
from pyggml.errors import TemplateError
from pyggml.lora.data.pipeline import CorpusReader
from pyggml.lora.data.reading.sources import FileSummary, Source
from pyggml.lora.data.records.rows import PromptRow, Row
from pyggml.lora.data.tokens.chats import CHAT, encoder_of
from pyggml.lora.data.tokens.documents import Document, Documents
from pyggml.lora.data.tokens.reader import FileContent
from pyggml.lora.data.windows.batches import Dataset, FileWindows, no_documents
from pyggml.lora.data.windows.lengths import refuse_longer
from pyggml.lora.data.windows.packing import held_out, join
from pyggml.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False, kw_only=True)
class Prompts(Dataset):
    """Windows of one prompt each. rows: (n,) the PromptRow of each."""

    rows: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray | None, ...]:
        """With the text of all rows: a run whose answers are judged otherwise is another one."""
        text = json.dumps([row.columns for row in self.rows], default=str, sort_keys=True)
        return *super().arrays, np.frombuffer(text.encode(), np.uint8)

    def prompt(self, window: int) -> np.ndarray:
        """The tokens of one, (n,) int32."""
        return np.asarray(self.tokens[window][self.documents[window] >= 0])


class PromptReader(CorpusReader):
    """Reads rows into windows of one prompt each, with the rows, which no cache keeps."""

    text_lacks, compares = "asks nothing", True

    def encode_row(self, row: Row) -> Sequence[Document]:
        assert isinstance(row, PromptRow)
        document = encode_prompt(row, self.tokenizer, self)
        self._rows.append(row)
        return [document]

    def documents(self, source: Source) -> FileContent:
        self._rows, self.cache = list[PromptRow](), None
        return super().documents(source)

    def windows(self, path: Path, content: FileContent, share: float) -> FileWindows:
        documents, rows = content.kept.documents, np.empty(len(self._rows), object)
        rows[:] = self._rows
        fits = documents.lengths <= self.ctx
        if self.config.long_chats != "drop":
            ways = "give a larger --ctx, or --long-chats drop"
            about = f"which leave room for an answer in a window: {ways}"
            refuse_longer(documents.lengths, self.ctx, lambda i: rows[i].place, about)
        documents, rows = documents.part(np.flatnonzero(fits)), rows[fits]
        out = np.zeros(len(rows), np.bool_)
        out[held_out(documents.lengths.tolist(), share, self.config.val_shuffle)] = True
        whole, n_out, kind = self._place(documents, rows), int(out.sum()), content.kept.kind
        summary = FileSummary(Source(path), kind, len(rows), n_out, documents.n_tokens)
        summary = replace(summary, n_dropped=int(np.count_nonzero(~fits)))
        return FileWindows(whole.part(~out), whole.part(out), summary)

    def _place(self, documents: Documents, rows: np.ndarray) -> Prompts:
        """Each prompt in its window."""
        tokens = np.zeros((len(rows), self.ctx + 1), np.int32)
        owner = np.tile(no_documents(self.ctx + 1), (len(rows), 1))
        ends = zip(documents.starts.tolist(), documents.lengths.tolist(), strict=True)
        for i, (start, n) in enumerate(ends):
            tokens[i, :n], owner[i, :n] = documents.ids[start : start + n], i
        return Prompts(tokens, owner, rows=rows)

    def join(self, datasets: Sequence[Dataset]) -> Prompts:
        parts = [d for d in datasets if isinstance(d, Prompts) and len(d)]
        if not parts:
            empty = np.empty((0, self.ctx + 1), np.int32)
            return Prompts(empty, empty, rows=np.empty(0, object))
        whole, rows = join(parts), np.concatenate([d.rows for d in parts])
        return Prompts(whole.tokens, whole.documents, repeats=whole.repeats, rows=rows)


def encode_prompt(row: PromptRow, tokenizer: Tokenizer, reader: CorpusReader) -> Document:
    """The tokens up to where an answer begins. Raises BadValue for a prompt without any, and for
    messages that the template refuses."""
    chats, messages = reader.encoding.chats, row.prompt
    if isinstance(messages, str):
        if chats is None or not row.is_question:
            ids, notes = tokenizer.encode_prompt(messages), ()
            if not ids:
                raise BadValue("has an empty prompt, which an answer cannot go on from")
            return Document(ids, None, notes)
        messages = ({"role": "user", "content": messages},)
    try:
        return Document(encoder_of(tokenizer, chats).prompt(messages, row.tools), None, (CHAT,))
    except TemplateError as error:
        raise BadValue(str(error), joint=": ") from None
