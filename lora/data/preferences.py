"""Files of preferences → the windows to train on and those held out."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pyggml.errors import ConfigError
from pyggml.lora.config import DataConfig
from pyggml.lora.data.pipeline import CorpusReader
from pyggml.lora.data.reading.files import UNITS
from pyggml.lora.data.reading.sources import File
from pyggml.lora.data.records.rows import Row
from pyggml.lora.data.tokens.cache import TokenCache
from pyggml.lora.data.tokens.documents import Document
from pyggml.lora.data.tokens.reader import FileContent
from pyggml.lora.data.unused import unused_by_answers
from pyggml.lora.data.windows.answers import Preferences, documents_of, fill_windows, windows_of
from pyggml.lora.data.windows.batches import Corpus, Dataset, FileWindows
from pyggml.lora.data.windows.packing import join
from pyggml.tokenizer import Tokenizer


class _AnswerReader(CorpusReader):
    """Reads rows into windows of whole answers."""

    text_lacks = "prefers nothing"

    def encode_row(self, row: Row) -> Sequence[Document]:
        return documents_of(row, self.tokenizer, self.encoding)

    def windows(self, path: Path, content: FileContent, share: float) -> FileWindows:
        unit, kind = UNITS[content.kept.kind], self.schema.purpose
        return windows_of(content.kept.documents, str(path), unit, self.config, share, kind)

    def join(self, datasets: Sequence[Dataset]) -> Preferences:
        parts = [p for p in datasets if isinstance(p, Preferences) and len(p)]
        return _join(parts) if parts else fill_windows([], self.ctx)


def read_preferences(
    files: Sequence[File],
    tokenizer: Tokenizer,
    config: DataConfig,
    kind: str,
    cache: TokenCache | None = None,
    held_out: Sequence[File] = (),
) -> Corpus:
    """Windows of the "pairs", or of the answers of "labels", of JSON Lines, JSON, CSV or parquet.

    Files, config, cache and held_out are as of `read_corpus`. Raises DataError for files that
    cannot be read or are plain text, rows that have no preference or do not fit into a window, and
    fewer than two single answers; ConfigError for settings that would do nothing.
    """
    if faults := unused_by_answers(config, f"an objective of {kind}"):
        raise ConfigError(faults)
    return _AnswerReader(tokenizer, config, cache, kind).corpus(files, held_out)


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
