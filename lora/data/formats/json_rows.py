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
    """The items of a list, or the one value that a file is.

    Raises DataError where the list breaks off or is no JSON.
    """
    text = _Window(blocks(path))
    if text.next() != "[":
        yield Place(str(path), "item", 1), text.value(path, 1)
        return
    text.skip()
    number = 0
    while text.next() != "]" or number:
        number += 1
        yield Place(str(path), "item", number), text.value(path, number)
        if text.next() == "]":
            break
        if text.next() != ",":
            token = f"{text.next()!r}" if text.next() else "the end of the file"
            raise DataError(f"{path}: after item {number} stands {token}, wanted a comma or ]")
        text.skip()
    text.skip()
    if text.next():
        raise DataError(f"{path}: after the list of {number} items stands {text.next()!r}")


class _Window:
    """The part of a text under way: it grows until the value at its start is whole."""

    def __init__(self, source: Iterator[str]) -> None:
        self._source, self._text, self._at = source, "", 0

    def next(self) -> str:
        """The next character that is no white space; "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text) or not self._grow():
                return self._text[self._at : self._at + 1]

    def skip(self) -> None:
        self._at += 1

    def value(self, path: Path, number: int) -> Any:
        """The JSON value here. DataError if there is none, or it is too long."""
        self.next()
        wanted = 1
        while True:
            try:
                item, end = _DECODER.raw_decode(self._text, self._at)
                # A number at the very end may go on, and an object may have been cut in two.
                if end < len(self._text) or not self._grow():
                    self._at = end
                    return item
            except (ValueError, RecursionError) as error:
                if len(self._text) - self._at > MOST_BYTES:
                    fault = f"is longer than {MOST_BYTES >> 20} MiB, or no JSON"
                    raise DataError(f"{path}: item {number} {fault}") from None
                if isinstance(error, RecursionError) or not self._grow(wanted):
                    reason = _reason(error)
                    raise DataError(f"{path}: item {number} is no JSON ({reason})") from None
                wanted *= 2  # so that a long value is not parsed once for each block

    def _grow(self, n_blocks: int = 1) -> bool:
        """Read on; whether there was more."""
        more = [block for _, block in zip(range(n_blocks), self._source, strict=False)]
        self._text, self._at = self._text[self._at :] + "".join(more), 0
        return any(more)


def _reason(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. ValueError for a name that is given twice: which one was meant, nobody knows."""
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice[:20]!r} stands twice in one object")
    return record


_DECODER = json.JSONDecoder(object_pairs_hook=_once)
