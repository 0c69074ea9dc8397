"""FileFormat: how a format of records is told, and read; and what all of them share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyggml.errors import DataError
from pyggml.lora.data.formats.packed import suffix_of
from pyggml.lora.data.records import Schema
from pyggml.lora.data.records.rows import RowPlace

Records = Iterator[tuple[RowPlace, Any]]


@dataclass(frozen=True, slots=True)
class FileStart:
    """The first bytes of a file, and whether they are all of it."""

    path: Path
    start: bytes
    is_all: bool

    @property
    def suffix(self) -> str:
        """The ending of the name, without that of a compression: .jsonl"""
        return suffix_of(self.path)

    @property
    def text(self) -> str:
        return self.start.decode(errors="ignore").lstrip()


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A format of files that hold records.

    unit      what a record is called where its place is told: line 3
    is_this   (start, schema) -> whether a file that begins so has this format; the schema says
              which names are known
    records   (path, schema) -> what stands in a file: values, or BadValue where there is none
    """

    name: str
    unit: str
    is_this: Callable[[FileStart, Schema], bool]
    records: Callable[[Path, Schema], Records]


def of_table(path: Path, records: Records, schema: Schema, has: str) -> Records:
    """The records of a table, whose columns are the names of the first one.

    Raises DataError for a table without the columns of a row; has: what it says of those it has.
    """
    for i, (place, record) in enumerate(records):
        if not i and isinstance(record, dict) and not schema.has_row(record):
            columns = ", ".join([name[:20] for name in record][:5])
            fault = f"{path}: {has} columns {columns}{schema.suggest(record)}"
            raise DataError(f"{fault}; {schema.columns_sought}")
        yield place, record
