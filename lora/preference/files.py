"""Files of preferences → the windows to train on and those held out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pyggml.errors import DataError
from pyggml.lora.config import DataConfig
from pyggml.lora.data import Corpus, Dataset, Source
from pyggml.lora.data.encode import Encoding
from pyggml.lora.data.expand import expanded
from pyggml.lora.data.files import Faults, check_rows, format_of, rows
from pyggml.lora.data.records import Schema, schema_of
from pyggml.lora.data.rows import Row
from pyggml.lora.preference.data import Preferences, preference_corpus
from pyggml.tokenizer import Tokenizer

_PURPOSES = {"dpo": "preference", "orpo": "preference", "kto": "kto"}


def read_preferences(
    files: Sequence[str | os.PathLike[str] | Source],
    tokenizer: Tokenizer,
    config: DataConfig,
    objective: str,
) -> Corpus:
    """Windows of the pairs (dpo, orpo) or the answers (kto) of JSON Lines, JSON, CSV or parquet.

    config: as `read_corpus` has it; `cache_dir` is for text and answers to learn. Raises DataError
    for files that cannot be read or are plain text, rows that are not as wanted, and as
    `preference_corpus` does.
    """
    schema = schema_of(config.columns, _PURPOSES[objective])
    encoding = Encoding.of(config, tokenizer)

    def corpus_of(source: Source, share: float) -> Corpus:
        found, faults = _rows(source.path, schema, config.skip_bad_rows)
        made = preference_corpus(found, tokenizer, config.ctx, share, objective, encoding)
        (whole,) = made.found
        return replace(made, found=(replace(whole, source=source, skipped=faults),))

    apart, left_out = expanded([Source(Path(f)) for f in config.val_file or ()], schema)
    sources, others = expanded([Source.of(f) for f in files], schema)
    held_out = [corpus_of(source, 0.0) for source in apart]
    trained = [corpus_of(source, 0.0 if held_out else config.val_split) for source in sources]
    validation = [c.validation for c in trained] + [c.train for c in held_out]
    told = [f for c in trained for f in c.found]
    told += [replace(f, n_held_out=f.n_documents) for c in held_out for f in c.found]
    return Corpus(
        _joined([_repeated(c) for c in trained]),
        _joined([v for v in validation if v is not None]) if any(validation) else None,
        tuple(told),
        (*others, *left_out),
        config.settled(),
    )


def _rows(path: Path, schema: Schema, skip_bad_rows: bool) -> tuple[list[Row], Faults]:
    kind, faults = format_of(path, schema), Faults()
    if kind == "text":
        raise DataError(f"{path}: is plain text, which prefers nothing; {schema.wanted}")
    found = list(rows(path, kind, schema, faults))
    check_rows(path, schema, len(found), Faults() if skip_bad_rows else faults)
    return found, faults


def _repeated(corpus: Corpus) -> Dataset:
    """The windows to train on, each as often as its file's weight says."""
    (found,), train = corpus.found, corpus.train
    if found.source.weight == 1:
        return train
    return replace(train, repeats=np.full(len(train), found.source.weight))


def _joined(parts: Sequence[Dataset]) -> Preferences:
    """The windows of all files, one file's after another's."""
    mismatched = [p.mismatched for p in parts if isinstance(p, Preferences) and p.mismatched]
    repeats = [np.ones(len(p)) if p.repeats is None else p.repeats for p in parts]
    is_weighted = any(p.repeats is not None for p in parts)
    return Preferences(
        np.concatenate([p.tokens for p in parts]),
        np.concatenate([p.documents for p in parts]),
        np.concatenate([p.trained for p in parts if p.trained is not None]),
        repeats=np.concatenate(repeats) if is_weighted else None,
        mismatched=_joined(mismatched) if mismatched else None,
    )
