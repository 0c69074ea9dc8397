"""Rows of a program → rows for training: a list, a generator, or a `datasets.Dataset`.

Each is a text, a dict with the names that rows of files have, or a row of `pyggml.lora.data.rows`.
They are read once, one after the other, so that a generator need not fit into memory.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from pyggml.errors import DataError
from pyggml.lora.data.files import UNITS, Faults, rows_of
from pyggml.lora.data.records import Schema
from pyggml.lora.data.rows import Place, Row

_ROWS = get_args(Row)


def check_given(rows: Any, name: str) -> None:
    """DataError for what goes on by something else than rows."""
    about = f"{name} is of the type {type(rows).__name__}"
    if isinstance(rows, str | bytes | Path):
        raise DataError(f"{about}, wanted rows; read_corpus reads files")
    if isinstance(rows, Mapping):
        some = ", ".join(map(repr, list(rows)[:3]))
        raise DataError(f"{about}, of {some}, wanted the rows of one, {name}[...]")
    if hasattr(rows, "to_dict") and hasattr(rows, "iloc"):  # pandas' go on by columns
        raise DataError(f"{about}, wanted rows: {name}.to_dict('records') has them")
    if not isinstance(rows, Iterable):
        raise DataError(f"{about}, wanted a list, a generator or a datasets.Dataset")


def given_rows(
    rows: Iterable[Any],
    name: Path,
    schema: Schema,
    faults: Faults,
    notes: dict[str, tuple[int, str]],
) -> Iterator[Row]:
    """The rows, each with its place, counted from 1; faults and notes as of `files.rows_of`."""
    for number, given in enumerate(rows, 1):
        place = Place(str(name), UNITS["rows"], number)
        if isinstance(given, _ROWS):
            yield replace(given, place=place)
            continue
        record = {"text": given} if isinstance(given, str) else given
        if isinstance(record, Mapping) and not isinstance(record, dict):
            record = dict(record)
        yield from rows_of([(place, record)], schema, faults, notes)
