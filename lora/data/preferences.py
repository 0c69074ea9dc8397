"""Files of preferences → the windows to train on and those held out."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pyggml.lora.data.pipeline import CorpusReader
from pyggml.lora.data.reading.files import UNITS
from pyggml.lora.data.records.rows import Row
from pyggml.lora.data.tokens.documents import Document
from pyggml.lora.data.tokens.reader import FileContent
from pyggml.lora.data.windows.answers import Preferences, documents_of, fill_windows, windows_of
from pyggml.lora.data.windows.batches import Dataset, FileWindows
from pyggml.lora.data.windows.packing import join


class PreferenceReader(CorpusReader):
    """Reads pairs, or the answers of labels, into windows of whole answers."""

    text_lacks, compares = "prefers nothing", True

    def encode_row(self, row: Row) -> Sequence[Document]:
        return documents_of(row, self.tokenizer, self.encoding)

    def windows(self, path: Path, content: FileContent, share: float) -> FileWindows:
        unit, kind = UNITS[content.kept.kind], self.schema.purpose
        return windows_of(content.kept.documents, str(path), unit, self.config, share, kind)

    def join(self, datasets: Sequence[Dataset]) -> Preferences:
        parts = [p for p in datasets if isinstance(p, Preferences) and len(p)]
        return _join(parts) if parts else fill_windows([], self.ctx)


def _join(parts: Sequence[Preferences]) -> Preferences:
    mismatched = [p.mismatched for p in parts if p.mismatched is not None]
    room, whole = max(p.room for p in parts), join(parts)
    return Preferences(
        whole.tokens,
        whole.documents,
        whole.trained,
        whole.repeats,
        signs=np.concatenate([np.pad(p.signs, ((0, 0), (0, room - p.room))) for p in parts]),
        mismatched=_join(mismatched) if mismatched else None,
    )
