"""Rows of a program → records: a list, a generator, or a `datasets.Dataset`.

Each is a text, a dict with the names that rows of files have, or a row of
`pyggml.lora.data.records.rows`. They are read once, one after the other, so that a
generator need not fit into memory.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pyggml.errors import DataError
from pyggml.lora.data.reading.files import UNITS
from pyggml.lora.data.records.rows import RowPlace


def records_of_program(rows: Iterable[Any], name: Path) -> Iterator[tuple[RowPlace, Any]]:
    """Rows, and records as files have them, each with its place, counted from 1.

    Raises DataError for what goes on by something else than rows.
    """
    _check(rows, name)
    for number, item in enumerate(rows, 1):
        record = {"text": item} if isinstance(item, str) else item
        if isinstance(record, Mapping) and not isinstance(record, dict):
            record = dict(record)
        yield RowPlace(str(name), UNITS["rows"], number), record


def _check(rows: Any, name: Path) -> None:
    about = f"{name} is of the type {type(rows).__name__}"
    if isinstance(rows, str | bytes | Path):
        raise DataError(f"{about}, wanted rows; read_corpus reads files")
    if isinstance(rows, Mapping):
        keys = ", ".join(map(repr, list(rows)[:3]))
        raise DataError(f"{about}, of {keys}, wanted the rows of one, {name}[...]")
    if hasattr(rows, "to_dict") and hasattr(rows, "iloc"):  # pandas' go on by columns
        raise DataError(f"{about}, wanted rows: {name}.to_dict('records') has them")
    if not isinstance(rows, Iterable):
        raise DataError(f"{about}, wanted a list, a generator or a datasets.Dataset")
