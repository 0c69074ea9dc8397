"""JSON Lines and JSON → records, one in memory at a time."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyggml.errors import DataError
from pyggml.lora.data.formats.source import MOST_BYTES, blocks, lines
from pyggml.lora.data.rows import BadRow, Place

_SPACE = " \t\r\n"


def parse_json(text: str) -> Any:
    """A JSON value. BadRow if it is none, or gives a name twice."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"is no JSON ({_reason(error)})") from None


def value_at_start(text: str) -> tuple[Any, int] | None:
    """The JSON value that a text starts with, and where it ends; None if it starts with none."""
    try:
        return _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None


def json_lines(path: Path) -> Iterator[tuple[Place, Any]]:
    """A value for each line that is not blank."""
    for number, line in enumerate(lines(path), 1):
        place = Place(str(path), "line", number)
        if isinstance(line, BadRow):
            yield place, line
        elif line.strip():
            try:
                yield place, parse_json(line)
            except BadRow as bad:
                yield place, bad


def json_items(path: Path) -> Iterator[tuple[Place, Any]]:
    """The items of a list; or the values that stand one after the other, often just one.

    Raises DataError where the list breaks off or is no JSON.
    """
    text = _Window(path, blocks(path))
    items = text.list_items() if text.next() == "[" else text.values()
    for number, item in enumerate(items, 1):
        yield Place(str(path), "item", number), item


class _Window:
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
                raise DataError(f"{self._path}: {_lonely(comma)}")
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
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text) or not self._grow():
                return self._text[self._at : self._at + 1]

    def _skip(self) -> tuple[int, int]:
        """Go on behind a character; its line and column."""
        place = _place_in(self._text, self._at, self._first)
        self._at += 1
        return place

    def _stands(self, before: str, wanted: str) -> DataError:
        line, column = _place_in(self._text, self._at, self._first)
        token = f"{self.next()!r}" if self.next() else "the end of the file"
        where = f"line {line}, column {column}"
        return DataError(f"{self._path}: {where}: after {before} stands {token}, wanted {wanted}")

    def _value(self, number: int) -> Any:
        self.next()
        n_blocks = 1
        while True:
            first = self._first
            try:
                item, end = _DECODER.raw_decode(self._text, self._at)
                # A number at the very end may go on, and an object may have been cut in two.
                if end < len(self._text) or not self._grow():
                    self._at = end
                    return item
            except (ValueError, RecursionError) as error:
                if len(self._text) - self._at > MOST_BYTES:
                    fault = f"is longer than {MOST_BYTES >> 20} MiB, or no JSON"
                    raise DataError(f"{self._path}: item {number} {fault}") from None
                if isinstance(error, RecursionError) or not self._grow(n_blocks):
                    reason = _reason(error, first)
                    raise DataError(f"{self._path}: item {number} is no JSON ({reason})") from None
                n_blocks *= 2  # so that a long value is not parsed once for each block

    def _grow(self, n_blocks: int = 1) -> bool:
        """Read on; whether there was more."""
        more = [block for _, block in zip(range(n_blocks), self._source, strict=False)]
        self._first = _place_in(self._text, self._at, self._first)
        self._text, self._at = self._text[self._at :] + "".join(more), 0
        return any(more)


# -- faults -------------------------------------------------------------------------------------


def _place_in(text: str, at: int, first: tuple[int, int]) -> tuple[int, int]:
    """Line and column, from 1, of a character; `first`: those of the text's first one."""
    n_lines, last = text.count("\n", 0, at), text.rfind("\n", 0, at)
    return first[0] + n_lines, at - last if n_lines else first[1] + at


def _lonely(comma: str) -> str:
    return f"the comma at {comma} has nothing after it"


def _reason(error: Exception, first: tuple[int, int] | None = None) -> str:
    """Why a text is no JSON. first: line and column of its first character; None: it is a line."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    text, at = error.doc, error.pos

    def where(i: int) -> str:
        line, column = _place_in(text, i, first or (1, 1))
        return f"line {line}, column {column}" if first else f"column {column}"

    before = at if text[at : at + 1] == "," else len(text[:at].rstrip(_SPACE)) - 1
    if text[before : before + 1] == "," and text[before + 1 :].lstrip(_SPACE)[:1] in ("}", "]"):
        return _lonely(where(before))
    return f"{error.msg} at {where(at)}"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. ValueError for a name that is given twice: which one was meant, nobody knows."""
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice[:20]!r} stands twice in one object")
    return record


_DECODER = json.JSONDecoder(object_pairs_hook=_once)
