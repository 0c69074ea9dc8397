"""JSON Lines and JSON → records, one in memory at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyggml.chat.messages import BadValue, is_message, parse_json
from pyggml.errors import DataError
from pyggml.files.json_text import DECODER, SPACE, lonely, place_in, reason_of
from pyggml.lora.data.formats.format import FileFormat, FileStart, Records
from pyggml.lora.data.formats.source import MOST_BYTES, blocks, lines
from pyggml.lora.data.records import Schema
from pyggml.lora.data.records.rows import RowPlace

_ENDINGS = (".jsonl", ".ndjson", ".json")


def _is_json(file: FileStart, schema: Schema) -> bool:
    """A list whose first item is a row, an object over several lines, or one that is all; and what
    a file of the ending .json begins with."""
    text, is_json = file.text, file.suffix == ".json"
    if text[:1] == "[":
        return is_json or _has_row(text[1:].lstrip(), schema)
    if text[:1] != "{" or not (file.suffix in _ENDINGS or _has_row(text, schema)):
        return False
    value = value_at_start(text)
    if value is None:
        return is_json and not file.is_all
    item, end = value
    is_all = not text[end:].strip() and file.is_all
    return "\n" in text[:end] or (is_all and (is_json or bool(_rows_in(item, schema))))


def _is_json_lines(file: FileStart, schema: Schema) -> bool:
    """What is no JSON, though its ending says so or it begins with a row."""
    return file.suffix in _ENDINGS or _has_row(file.text, schema)


def _has_row(text: str, schema: Schema) -> bool:
    """Whether the text starts with a JSON object that is a row, or holds rows alone."""
    item = value_at_start(text) if text[:1] == "{" else None
    return item is not None and (schema.has_row(item[0]) or bool(_rows_in(item[0], schema)))


def _unfolded(path: Path, schema: Schema) -> Records:
    """The items; or the rows that an item holds."""
    for place, item in json_items(path):
        inner = _rows_in(item, schema) if isinstance(item, dict) else []
        if not inner:
            yield place, item
        for n, row in enumerate(inner, 1):
            yield RowPlace(place.file, place.unit, n), row


def _rows_in(item: dict[str, Any], schema: Schema) -> list[Any]:
    """The rows of an object that holds nothing else: {"data": [row, …]}, or, as PubMedQA's file is
    one, {"1": row, "2": row, …}. One list of messages is a chat."""
    inner = [] if schema.has_row(item) else list(item.values())
    if len(inner) == 1 and isinstance(inner[0], list):
        inner = inner[0]
        first = inner[0] if inner else None
        return inner if isinstance(first, dict) and not is_message(first) else []
    return inner if all(isinstance(i, dict) and schema.has_row(i) for i in inner) else []


def value_at_start(text: str) -> tuple[Any, int] | None:
    """The JSON value that a text starts with, and where it ends; None if it starts with none."""
    try:
        return DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None


def json_lines(path: Path) -> Iterator[tuple[RowPlace, Any]]:
    """A value for each line that is not blank."""
    for number, line in enumerate(lines(path), 1):
        place = RowPlace(str(path), "line", number)
        if isinstance(line, BadValue):
            yield place, line
        elif line.strip():
            try:
                yield place, parse_json(line)
            except BadValue as bad:
                yield place, bad


def json_items(path: Path) -> Iterator[tuple[RowPlace, Any]]:
    """The items of a list; or the values that stand one after the other, often just one.

    Raises DataError where the list breaks off or is no JSON.
    """
    text = _ValueWindow(path, blocks(path))
    items = text.list_items() if text.next() == "[" else text.values()
    for number, item in enumerate(items, 1):
        yield RowPlace(str(path), "item", number), item


class _ValueWindow:
    """The part of a file under way: it grows until the value at its start is whole.

    Raises DataError, with line and column, where there is no value, or one that is too long.
    """

    def __init__(self, path: Path, source: Iterator[str]) -> None:
        self._path, self._source = path, source
        self._text, self._at = "", 0
        self._first = (1, 1)  # line and column of the first character of the part

    def list_items(self) -> Iterator[Any]:
        self._skip()
        number = 0
        while self.next() != "]" or number:
            number += 1
            yield self._value(number)
            if self.next() == "]":
                break
            if self.next() != ",":
                raise self._stands(f"item {number}", "a comma or ]")
            line, column = self._skip()
            if self.next() == "]":
                comma = f"line {line}, column {column}"
                raise DataError(f"{self._path}: {lonely(comma)}")
        self._skip()
        if self.next():
            raise self._stands(f"the list of {number} items", "nothing more")

    def values(self) -> Iterator[Any]:
        number = 0
        while self.next() or not number:
            number += 1
            if number > 1 and self.next() not in "[{":
                raise self._stands(f"item {number - 1}", "the next object, or a list of all in [ ]")
            yield self._value(number)

    def next(self) -> str:
        """The next character that is no white space; "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in SPACE:
                self._at += 1
            if self._at < len(self._text) or not self._grow():
                return self._text[self._at : self._at + 1]

    def _skip(self) -> tuple[int, int]:
        """Go on behind a character; its line and column."""
        place = place_in(self._text, self._at, self._first)
        self._at += 1
        return place

    def _stands(self, before: str, demand: str) -> DataError:
        line, column = place_in(self._text, self._at, self._first)
        token = f"{self.next()!r}" if self.next() else "the end of the file"
        where = f"line {line}, column {column}"
        return DataError(f"{self._path}: {where}: after {before} stands {token}, wanted {demand}")

    def _value(self, number: int) -> Any:
        self.next()
        n_blocks = 1
        while True:
            first = self._first
            try:
                item, end = DECODER.raw_decode(self._text, self._at)
                # A number at the very end may go on, and an object may have been cut in two.
                if end < len(self._text) or not self._grow():
                    self._at = end
                    return item
            except (ValueError, RecursionError) as error:
                if len(self._text) - self._at > MOST_BYTES:
                    fault = f"is longer than {MOST_BYTES >> 20} MiB, or no JSON"
                    raise DataError(f"{self._path}: item {number} {fault}") from None
                if isinstance(error, RecursionError) or not self._grow(n_blocks):
                    reason = reason_of(error, first)
                    raise DataError(f"{self._path}: item {number} is no JSON ({reason})") from None
                n_blocks *= 2  # so that a long value is not parsed once for each block

    def _grow(self, n_blocks: int = 1) -> bool:
        """Read on; whether there was more."""
        more = [block for _, block in zip(range(n_blocks), self._source, strict=False)]
        self._first = place_in(self._text, self._at, self._first)
        self._text, self._at = self._text[self._at :] + "".join(more), 0
        return any(more)


JSON = FileFormat("JSON", "item", _is_json, _unfolded)
JSON_LINES = FileFormat("JSON Lines", "line", _is_json_lines, lambda path, _: json_lines(path))
