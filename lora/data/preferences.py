"""Files of preferences → the windows to train on and those held out."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pyggml.errors import ConfigError, DataError
from pyggml.lora.config import DataConfig
from pyggml.lora.data.answers import Preferences, corpus_of, documents_of
from pyggml.lora.data.cache import CachedDocuments, TokenCache
from pyggml.lora.data.documents import Document
from pyggml.lora.data.expand import expand
from pyggml.lora.data.files import UNITS, format_of
from pyggml.lora.data.reader import RowReader
from pyggml.lora.data.rows import Row
from pyggml.lora.data.sources import Source
from pyggml.lora.data.unused import unused_by_answers
from pyggml.lora.data.windows import Corpus, Dataset
from pyggml.tokenizer import Tokenizer


class _Answers(RowReader):
    """Reads rows into the documents of their answers."""

    def encode_row(self, row: Row) -> Sequence[Document]:
        return documents_of(row, self.tokenizer, self.encoding)

    def read(self, path: Path) -> CachedDocuments:
        if format_of(path, self.schema) == "text":
            raise DataError(
                f"{path}: is plain text, which prefers nothing; {self.schema.names_sought}"
            )
        return super().read(path)

    def corpus(self, source: Source, share: float) -> Corpus:
        """The windows of one file."""
        read = self.documents(source)
        kept = read.kept
        unit, path = UNITS[kept.kind], str(source.path)
        made = corpus_of(kept.documents, path, unit, self.config, share, self.schema.purpose)
        (whole,) = made.files
        whole = replace(
            whole,
            source=replace(source, rows=None),
            skipped=kept.faults,
            was_kept=read.was_kept,
            not_kept=read.not_kept,
            notes=kept.notes,
        )
        return replace(made, files=(whole,))


def read_preferences(
    files: Sequence[str | os.PathLike[str] | Source],
    tokenizer: Tokenizer,
    config: DataConfig,
    kind: str,
    cache: TokenCache | None = None,
    held_out: Sequence[str | os.PathLike[str] | Source] = (),
) -> Corpus:
    """Windows of the "pairs", or of the answers of "labels", of JSON Lines, JSON, CSV or parquet.

    Files, config, cache and held_out are as of `read_corpus`. Raises DataError for files that
    cannot be read or are plain text, rows that are not as wanted, and as `preference_corpus` does;
    ConfigError for settings that would do nothing.
    """
    if faults := unused_by_answers(config, f"an objective of {kind}"):
        raise ConfigError(faults)
    reader = _Answers(tokenizer, config, cache, kind)
    aside = [*(Source(Path(f)) for f in config.val_file or ()), *map(Source.of, held_out)]
    apart, left_out = expand(aside, reader.schema)
    sources, others = expand([Source.of(f) for f in files], reader.schema)
    not_trained = [reader.corpus(source, 0.0) for source in apart]
    share = 0.0 if not_trained else config.val_split
    trained = [reader.corpus(source, share) for source in sources]
    validation = [c.validation for c in trained] + [c.train for c in not_trained]
    read = [f for c in trained for f in c.files]
    read += [replace(f, n_held_out=f.n_documents) for c in not_trained for f in c.files]
    return Corpus(
        _join([_repeat(c) for c in trained]),
        _join([v for v in validation if v is not None]) if any(validation) else None,
        tuple(read),
        (*others, *left_out),
        reader.about(read),
    )


def _repeat(corpus: Corpus) -> Dataset:
    """The windows to train on, each as often as its file's weight says."""
    (file,), train = corpus.files, corpus.train
    if file.source.weight == 1:
        return train
    return replace(train, repeats=np.full(len(train), file.source.weight))


def _join(datasets: Sequence[Dataset]) -> Preferences:
    """The windows of all files, one file's after another's."""
    parts = [p for p in datasets if isinstance(p, Preferences)]
    mismatched = [p.mismatched for p in parts if p.mismatched is not None]
    room = max((p.room for p in parts), default=0)
    repeats = [np.ones(len(p)) if p.repeats is None else p.repeats for p in parts]
    is_weighted = any(p.repeats is not None for p in parts)
    return Preferences(
        np.concatenate([p.tokens for p in parts]),
        np.concatenate([p.documents for p in parts]),
        np.concatenate([p.trained for p in parts if p.trained is not None]),
        repeats=np.concatenate(repeats) if is_weighted else None,
        signs=np.concatenate([np.pad(p.signs, ((0, 0), (0, room - p.room))) for p in parts]),
        mismatched=_join(mismatched) if mismatched else None,
    )
