"""A file → what of it is evaluated: text, rows, questions or pairs of answers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pyggml.errors import ConfigError, DataError
from pyggml.lora.config import DataConfig
from pyggml.lora.data import Dataset, Documents, Encoding, Row, Schema, encode_rows, pack, read_rows
from pyggml.lora.data.reading.expand import LeftOut, expand
from pyggml.lora.data.reading.files import format_of, records
from pyggml.lora.data.reading.sources import Source
from pyggml.lora.data.records import schema_of
from pyggml.lora.data.windows.lengths import refuse_longer
from pyggml.tokenizer import Tokenizer

TEXT, RECORDS, QUESTIONS, PAIRS = "text", "rows", "questions", "pairs"
CLASSES, GROUPS = "texts", "groups"  # texts with labels, texts that belong together
_OF_TEXTS = {"classes": CLASSES, "groups": GROUPS}
WRITTEN = "written"  # questions, or rows with an answer, whose answers the model writes
_BY_NAMES = {"question": QUESTIONS, "pairs": PAIRS}  # kinds that the first record's names tell


def read_file(path: Path, columns: Sequence[str] | None = None) -> tuple[str, list[Row]]:
    """The kind of a file, one of the above, by the names of its first record; and its rows.

    columns: see `pyggml.lora.data.records.schema_of`. Raises DataError as `read_rows` does.
    """
    schema = _schema(columns)
    kind = format_of(path, schema)
    if kind == "text":
        return TEXT, read_rows(path)[1]
    first = next((record for _, record in records(path, kind, schema)), None)
    for purpose in (*_BY_NAMES, "labels", *_OF_TEXTS):
        for_purpose = replace(schema, purpose=purpose)
        if isinstance(first, dict) and for_purpose.fits(first):
            if purpose == "labels":
                raise DataError(
                    f"{path}: has single answers with labels, wanted pairs of chosen and rejected: "
                    "evaluated is which of two a model prefers"
                )
            return {**_BY_NAMES, **_OF_TEXTS}[purpose], read_rows(path, for_purpose)[1]
    return RECORDS, read_rows(path, schema)[1]


def files_of(
    paths: Sequence[Path], columns: Sequence[str] | None = None
) -> tuple[list[Path], tuple[LeftOut, ...]]:
    """The files to evaluate: those of folders and patterns in their place; and what of folders was
    left out, with the reason. Raises DataError as training does."""
    sources, left_out = expand([Source(path) for path in paths], _schema(columns))
    return [source.path for source in sources], left_out


def _schema(columns: Sequence[str] | None) -> Schema:
    """For training; names that only questions or pairs have are known too."""
    for purpose in ("training", *_BY_NAMES, *_OF_TEXTS):
        try:
            return replace(schema_of(columns, purpose), purpose="training")
        except ConfigError:
            continue
    return schema_of(columns)


def windows(rows: Sequence[Row], tokenizer: Tokenizer, config: DataConfig) -> tuple[Dataset, int]:
    """Windows of config.ctx tokens of the rows, as training holds them out; and how many rows were
    left out because they are too long.

    Rows of text that are longer than a window go on in the next one; of longer prompts with
    completions and chats config.long_chats says what becomes of them. Raises DataError if one is
    refused, or if nothing is left.
    """
    documents = encode_rows(rows, tokenizer, Encoding.of(config, tokenizer))
    whole = any(document.trained is not None for document in documents)
    kept = [d for d in documents if not whole or len(d) <= config.ctx + 1]
    n_long = len(documents) - len(kept)
    if n_long and config.long_chats == "refuse":
        lengths = np.array([len(d) for d in documents])
        about = f"those of a window of {config.ctx}: give a larger --ctx, or --long drop or cut"
        refuse_longer(lengths, config.ctx + 1, lambda i: rows[i].place, about)
    dataset = pack(Documents.of(kept).pieces(config.ctx), config.ctx, whole=True)
    if not len(dataset):
        raise DataError(f"{rows[0].place.file}: holds no token to predict after another")
    return dataset, n_long
