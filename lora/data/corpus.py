"""Files → the windows to train on and those held out."""

import os
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from pyggml.lora.config import DataConfig
from pyggml.lora.data.reading.files import map_rows
from pyggml.lora.data.reading.sources import File, Source
from pyggml.lora.data.records.rows import Row
from pyggml.lora.data.tokens.cache import TokenCache
from pyggml.lora.data.tokens.documents import Document
from pyggml.lora.data.tokens.encode import AUTO, Encoding, encode
from pyggml.lora.data.windows.batches import Corpus
from pyggml.model import Model
from pyggml.tokenizer import Tokenizer

_READERS = {  # of rows: a module of this package, and the class there
    "training": ("texts", "TextReader"),
    "pairs": ("preferences", "PreferenceReader"),
    "labels": ("preferences", "PreferenceReader"),
    "prompts": ("prompts", "PromptReader"),
    "classes": ("classes", "ClassReader"),
    "groups": ("groups", "GroupReader"),
}


def read_corpus(
    files: File | Sequence[File],
    tokenizer: Tokenizer,
    config: DataConfig | None = None,
    cache: TokenCache | None = None,
    rows: str = "training",
    held_out: Sequence[File] = (),
) -> Corpus:
    """Windows of texts, and of the rows of JSON Lines, JSON, CSV and parquet.

    Of rows with prompt and completion the completion is learned, and an end of text after it; each
    lies whole in a window. The windows of a file hold nothing of another.

    files    each with a weight, see `Source.of`; folders, patterns and pipes, see `expand`
    cache    where tokens are kept for the next run; None keeps none
    rows     those that the objective reads: "training", "pairs", "labels", "prompts", "classes" or
             "groups"
    held_out files that are held out, beside those of config.val_file

    config.val_split is the share of the tokens of each file that is held out. Of a text: its last
    windows, at least one if there are two. Of rows: whole ones from anywhere in the file, or with
    config.val_shuffle off from its end; see `held_out`. With config.val_file it is not used.

    Raises DataError for files that cannot be read, are empty, are not UTF-8 (with the byte), have
    rows that are not as wanted or do not fit into a window (by number), or for too little text;
    ConfigError for settings that would do nothing.
    """
    sources = [files] if isinstance(files, str | os.PathLike | Source) else files
    module, name = _READERS[rows]  # other runs start without it
    reader = getattr(import_module(f"pyggml.lora.data.{module}"), name)
    read: Corpus = reader(tokenizer, config or DataConfig(), cache, rows).corpus(sources, held_out)
    return read


def corpus(
    rows: Iterable[Any],
    model: Model,
    config: DataConfig | None = None,
    *,
    held_out: Iterable[Any] | None = None,
    purpose: str = "training",
    cache: TokenCache | None = None,
) -> Corpus:
    """Windows of rows that stand in no file: a list, a generator or a `datasets.Dataset`, read
    once.

    A row is a text, a dict with the names of rows in files (docs/data.md), or one of
    `pyggml.lora.data.records.rows`. `read_corpus` says all else, and takes such rows beside files,
    as `Source(Path("name"), rows=rows)`.

    held_out  rows to validate on; None: a share of the rows, config.val_split
    purpose   what the objective reads, such as `DPO.rows`
    cache     names the folder for large arrays; the tokens are not kept
    """
    source = Source(Path("rows"), rows=rows)
    apart = [] if held_out is None else [Source(Path("held_out"), rows=held_out)]
    return read_corpus(source, model.tokenizer, config, cache, purpose, held_out=apart)


def encode_rows(
    rows: Sequence[Row], tokenizer: Tokenizer, encoding: Encoding = AUTO
) -> list[Document]:
    """The tokens of each row. Raises DataError for rows without any."""
    return map_rows(rows, lambda row: encode(row, tokenizer, encoding))
