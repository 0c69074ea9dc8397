"""Files → rows, whatever their format; a faulty one is told by its place and what was wanted.

format       told by                                                              a row
JSON Lines   .jsonl, .ndjson; else the first line is an object with known names   a line
JSON         the whole is a list, or one object                                   an item
CSV          .csv, .tsv; else the first line is a header with known names         a record
text         anything else                                                        the whole file

Names: `text`; or `prompt` and `completion`, of which the completion alone is learned.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyggml.errors import DataError
from pyggml.lora.data.rows import CompletionRow, Place, Row, TextRow

_BOM = "\ufeff"  # a byte order mark, which some editors put at the start of a file
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_SHOWN = 5  # faulty rows that an error lists
_WANTED = (
    'wanted one JSON object with a string "text" that is not empty, or with "prompt" and '
    '"completion", on each line'
)
_NAMES = ({"text"}, {"prompt", "completion"})
_KINDS = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "list",
    dict: "object",
}


def read_rows(path: Path) -> tuple[str, list[Row]]:
    """The format of a file, and its rows; empty lines are skipped.

    Raises DataError as `read_text` does, and for faulty rows, which it lists.
    """
    text = read_text(path)
    kind = _format(path, text)
    if kind == "text":
        return kind, [TextRow(Place(str(path), "text", 0), text, plain=True)]
    rows, faults = list[Row](), list[str]()
    for place, found, fault in _OF[kind](path, text):
        row, fault = (None, fault) if fault else _row(place, found)
        rows += [row] if row else []
        faults += [f"{place} is {fault}"] if fault else []
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise DataError(f"{path}: {'; '.join(faults[:_SHOWN])}{more}; {_WANTED}")
    if not rows:
        raise DataError(f"{path}: has no rows; {_WANTED}")
    return kind, rows


def read_text(path: Path) -> str:
    """A file's UTF-8 text, its line ends as they are, without a byte order mark.

    Raises DataError if it cannot be read, is not UTF-8 (with line and byte) or holds nothing to
    read.
    """
    try:
        raw = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read: {reason}") from error
    if raw.startswith(_UTF_16):
        raise DataError(f"{path}: is UTF-16, wanted UTF-8: save it as that")
    try:
        text = raw.decode().removeprefix(_BOM)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}: line {line}: byte {error.start} is 0x{raw[error.start]:02x}, which is not "
            "UTF-8 there"
        ) from None
    if not text.strip():
        raise DataError(f"{path}: is empty, wanted text")
    return text


# -- formats ------------------------------------------------------------------------------------


def _format(path: Path, text: str) -> str:
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return "JSON Lines"
    if suffix in (".csv", ".tsv"):
        return "CSV"
    start, first = text.lstrip()[:1], text.strip().split("\n", 1)[0]
    whole = _parsed(text) if start == "[" or suffix == ".json" else None
    if suffix == ".json":
        return "JSON" if isinstance(whole, list | dict) else "JSON Lines"
    if isinstance(whole, list) and whole and _is_row(whole[0]):
        return "JSON"
    if start == "{" and _is_row(_parsed(first)):
        return "JSON Lines"
    header = set(first.rstrip("\r").split(_comma(first)))
    return "CSV" if len(header) > 1 and any(names <= header for names in _NAMES) else "text"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_row(found: Any) -> bool:
    return isinstance(found, dict) and any(names <= found.keys() for names in _NAMES)


def _comma(header: str) -> str:
    """What stands between the columns of a CSV file."""
    return max(",;\t", key=header.count)


Found = Iterator[tuple[Place, Any, str | None]]  # place, what is there, or why it cannot be read


def _lines(path: Path, text: str) -> Found:
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removeprefix(_BOM)  # where files with marks were put together
        if line.strip():
            try:
                yield Place(str(path), "line", number), json.loads(line), None
            except (ValueError, RecursionError) as error:
                yield Place(str(path), "line", number), None, f"no JSON ({error})"


def _items(path: Path, text: str) -> Found:
    found = json.loads(text)
    for number, item in enumerate(found if isinstance(found, list) else [found], 1):
        yield Place(str(path), "item", number), item, None


def _records(path: Path, text: str) -> Found:
    csv.field_size_limit((1 << 31) - 1)
    reader = csv.DictReader(
        io.StringIO(text, newline=""), delimiter=_comma(text.lstrip().split("\n", 1)[0])
    )
    names = {str(name) for name in reader.fieldnames or ()}
    if not any(wanted <= names for wanted in _NAMES):
        shown = ", ".join(sorted(name[:20] for name in names)[:5])
        raise DataError(
            f"{path}: the first line names the columns {shown}; wanted text, or prompt and "
            "completion, among them"
        )
    try:
        for number, record in enumerate(reader, 1):
            yield Place(str(path), "record", number, reader.line_num), record, None
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num} is no CSV ({error})") from None


_OF = {"JSON Lines": _lines, "JSON": _items, "CSV": _records}


# -- rows ---------------------------------------------------------------------------------------


def _row(place: Place, found: Any) -> tuple[Row | None, str | None]:
    """A row, or what is wrong with it."""
    if not isinstance(found, dict):
        return None, f"a JSON {_KINDS[type(found)]}"
    names = next(
        (names for names in (("text",), ("prompt", "completion")) if _has(found, names)), ()
    )
    if not names:
        there = ", ".join(str(key)[:20] for key in list(found)[:5]) or "nothing"
        return None, f'an object without "text" (it has {there})'
    for name in names:
        fault = _fault(found[name], may_be_empty=name == "prompt")
        if fault:
            return None, f'an object whose "{name}" {fault}'
    if names == ("text",):
        return TextRow(place, found["text"]), None
    return CompletionRow(place, found["prompt"], found["completion"]), None


def _has(found: dict[str, Any], names: tuple[str, ...]) -> bool:
    return all(name in found for name in names)


def _fault(value: Any, may_be_empty: bool) -> str | None:
    if not isinstance(value, str):
        return f"is a {_KINDS[type(value)]}"
    if not value.strip() and not may_be_empty:
        return "is empty"
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can write half of a pair, which no UTF-8 can hold
        half = f"\\u{ord(value[error.start]):04x}"
        return f"has {half}, half of a surrogate pair, at character {error.start}"
    return None
