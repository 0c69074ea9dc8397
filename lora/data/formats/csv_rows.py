"""CSV with a header → records, one in memory at a time."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyggml.chat.messages import BadValue
from pyggml.errors import DataError
from pyggml.lora.data.formats.format import FileFormat, FileStart, of_table
from pyggml.lora.data.formats.source import MOST_BYTES, whole_lines
from pyggml.lora.data.records import Schema
from pyggml.lora.data.records.rows import RowPlace


def _is_csv(file: FileStart, schema: Schema) -> bool:
    """By its ending, or by a first line of known names."""
    names = header(file.text.split("\n", 1)[0])
    return file.suffix in (".csv", ".tsv") or (len(names) > 1 and schema.has_row(names))


def comma(header: str) -> str:
    """What stands between the columns."""
    return max(",;\t", key=header.count)


def header(line: str) -> list[str]:
    """The names of the columns; none if the line is no header."""
    try:
        return next(csv.reader([line.strip("\r\n")], delimiter=comma(line)), [])
    except csv.Error:
        return []


def csv_records(path: Path) -> Iterator[tuple[RowPlace, Any]]:
    """A dict for each record after the header; None for a column that a record lacks.

    Raises DataError for a header that names a column twice, and where the quotes never end.
    """
    csv.field_size_limit(MOST_BYTES)
    text = whole_lines(path)
    first, n_before = "", 0
    for first in text:
        if first.strip():
            break
        n_before += 1
    names = header(first)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{path}: the first line names {', '.join(twice)[:60]} twice")
    reader = csv.reader(text, delimiter=comma(first))
    number = 0
    try:
        for record in reader:
            if record:
                number += 1
                place = RowPlace(str(path), "record", number, n_before + 1 + reader.line_num)
                yield place, _row_of(names, record)
    except csv.Error as error:
        line = n_before + 1 + reader.line_num
        raise DataError(f"{path}: line {line} is no CSV ({error})") from None


def _row_of(names: list[str], record: list[str]) -> dict[str, str | None] | BadValue:
    if len(record) > len(names):
        return BadValue(f"has {len(record)} fields, the first line names {len(names)}")
    return dict.fromkeys(names) | dict(zip(names, record, strict=False))


CSV = FileFormat(
    "CSV", "record", _is_csv,
    lambda path, schema: of_table(path, csv_records(path), schema, "the first line names the"),
)  # fmt: skip
