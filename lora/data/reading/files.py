"""Files → rows, one in memory at a time; a faulty one is told by its place and what was wanted.

format       told by                                                         a record
parquet      its first bytes                                                 a row
JSON Lines   the first line is an object with known names; else .jsonl, .ndjson   a line
JSON         a list whose first item has known names, an object over lines;  an item, or a row
             else .json                                                      that it holds
CSV          .csv, .tsv; else the first line is a header with known names    a record
text         anything else                                                   the whole file

Each but parquet may be compressed, by gzip or Zstandard: .jsonl.gz.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from pyggml.chat.messages import BadValue
from pyggml.errors import DataError
from pyggml.lora.data.formats.csv_rows import CSV
from pyggml.lora.data.formats.format import FileStart, Records
from pyggml.lora.data.formats.json_rows import JSON, JSON_LINES
from pyggml.lora.data.formats.parquet import PARQUET
from pyggml.lora.data.formats.source import HEAD_BYTES, blocks, head
from pyggml.lora.data.records import TRAINING, Schema
from pyggml.lora.data.records.questions import settle
from pyggml.lora.data.records.rows import Row, RowPlace, TextRow

SHOWN = 5  # faults that are told, and places of each
UNREAD = "column "  # a note: before the name of a column that no row was made of
_MOST_COLUMNS = 100  # of which that is told
_ROWS = get_args(Row)
AnyRow = TypeVar("AnyRow", bound=Row)
Made = TypeVar("Made")


# -- formats ------------------------------------------------------------------------------------

# The first that a file has; what has none is text.
FORMATS = (PARQUET, JSON, JSON_LINES, CSV)
UNITS = {each.name: each.unit for each in FORMATS} | {"rows": "row"}


def format_of(path: Path, schema: Schema) -> str:
    """The name of a file's format; the schema says which names are known.

    Raises DataError for a file that cannot be read, is UTF-16 or a GGUF file, or holds nothing but
    white space.
    """
    start = head(path)
    if start.startswith(b"GGUF"):
        raise DataError(f"{path}: is a GGUF file, wanted text: -m names a model, -f data")
    file = FileStart(path, start, len(start) < HEAD_BYTES)
    return next((each.name for each in FORMATS if each.is_this(file, schema)), "text")


def records(path: Path, kind: str, schema: Schema) -> Records:
    """What stands in a file of this format but text: values, or BadValue where there is none.

    Raises DataError for a file that cannot be read on, or a table without the columns of a row.
    """
    return next(each for each in FORMATS if each.name == kind).records(path, schema)


# -- rows ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class RowFaults:
    """The rows of a file that are not as wanted.

    total        how many
    places       of the first few faults: where they are, the first few places of each
    counts       of these faults: how many rows have it
    lack_names   what names a row may have is worth telling
    """

    total: int = 0
    places: dict[str, list[str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    lack_names: bool = False

    def add(self, place: RowPlace, bad: BadValue, is_row: bool = False) -> None:
        """One more. is_row: its names are those of a row, whatever else is wrong."""
        self.total += 1
        self.lack_names |= not (is_row or bad.says_all)
        fault = f"{bad.joint}{bad}"
        if fault not in self.counts and len(self.counts) == SHOWN:
            return
        self.counts[fault] = self.counts.get(fault, 0) + 1
        places = self.places.setdefault(fault, [])
        if len(places) < SHOWN:
            places.append(str(place))

    def __str__(self) -> str:
        """Each fault once, with the places that have it."""
        more = self.total - sum(self.counts.values())
        said = [self._sentence(fault, n) for fault, n in self.counts.items()]
        return "; ".join(said) + (f"; and {more} more" if more else "")

    def _sentence(self, fault: str, n: int) -> str:
        first, *rest = self.places[fault]
        more = f" and {n - 1 - len(rest):,} more" if n - 1 > len(rest) else ""
        return f"{first}{fault}" + (f" (so too {', '.join(rest)}{more})" if rest else "")


def rows_of(
    placed: Iterable[tuple[RowPlace, Any]],
    schema: Schema,
    faults: RowFaults,
    notes: dict[str, tuple[int, str]],
) -> Iterator[Row]:
    """The rows of records, and those that are rows; faulty ones go to `faults`, columns that they
    are not made of to `notes`."""
    for place, record in placed:
        if isinstance(record, _ROWS):
            yield replace(record, place=place)
            continue
        try:
            if isinstance(record, BadValue):
                raise record
            row = schema.row(place, record)
        except BadValue as bad:
            faults.add(place, bad)
            continue
        for name in schema.unread(record):
            n, first = notes.get(f"{UNREAD}{name}", (0, str(place)))
            if n or len(notes) < _MOST_COLUMNS:
                notes[f"{UNREAD}{name}"] = (n + 1, first)
        yield row


def read_rows(path: Path, schema: Schema = TRAINING) -> tuple[str, list[Row]]:
    """The format of a file, and its rows in memory; empty lines are skipped.

    Raises DataError for a file that cannot be read, is not UTF-8 (with line and byte), holds
    nothing to read, or has faulty rows, which it lists.
    """
    kind, faults = format_of(path, schema), RowFaults()
    if kind == "text":
        text = "".join(blocks(path))
        return kind, [TextRow(RowPlace(str(path), "text", 0), text, plain=True)]
    pairs = settle([*rows_of(records(path, kind, schema), schema, faults, {})])
    for row, bad in pairs:
        if bad is not None:
            faults.add(row.place, bad)
    check_rows(path, schema, len(pairs), faults)
    return kind, [row for row, _ in pairs]


def map_rows(rows: Sequence[AnyRow], change: Callable[[AnyRow], Made]) -> list[Made]:
    """What each row becomes. Raises DataError with the rows of which it raises BadValue."""
    results, faults = [], RowFaults()
    for row in rows:
        try:
            results.append(change(row))
        except BadValue as bad:
            faults.add(row.place, bad, is_row=True)
    if faults.total:
        raise DataError(f"{rows[0].place.file}: {faults}")
    return results


def check_rows(path: Path, schema: Schema, n_rows: int, faults: RowFaults) -> None:
    """DataError if a row is faulty, or there is none."""
    if faults.total:
        clause = f"; {schema.names_sought}" if faults.lack_names else ""
        raise DataError(f"{path}: {faults}{clause}")
    if not n_rows:
        raise DataError(f"{path}: has no rows; {schema.names_sought}")
