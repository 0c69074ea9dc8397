"""Files → documents as text; a faulty line is told by its number, what it is, what was wanted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pyggml.errors import DataError

_BOM = "\ufeff"  # a byte order mark, which some editors put at the start of a file
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_SHOWN = 5  # faulty lines that an error lists
_WANTED = 'wanted one JSON object with a string "text" that is not empty on each line'
_KINDS = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "list",
    dict: "object",
}


def is_json_lines(path: Path) -> bool:
    return path.suffix.lower() in (".jsonl", ".json", ".ndjson")


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


def read_lines(path: Path) -> list[str]:
    """The texts of JSON Lines; lines without a character are skipped.

    Raises DataError as `read_text` does, and for faulty lines, which it lists.
    """
    documents, faults = [], []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        line = line.removeprefix(_BOM)  # where files with marks were put together
        if not line.strip():
            continue
        document, fault = _document(line)
        documents.append(document)
        if fault:
            faults.append(f"line {number} is {fault}")
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise DataError(f"{path}: {'; '.join(faults[:_SHOWN])}{more}; {_WANTED}")
    return documents


def _document(line: str) -> tuple[str, str | None]:
    """The text of a line, or what is wrong with it."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        return "", f"no JSON ({error})"
    if not isinstance(found, dict):
        return "", f"a JSON {_kind(found)}"
    if "text" not in found:
        names = ", ".join(str(key)[:20] for key in list(found)[:5]) or "nothing"
        return "", f'an object without "text" (it has {names})'
    document = found["text"]
    if not isinstance(document, str):
        return "", f'an object whose "text" is a {_kind(document)}'
    if not document.strip():
        return "", 'an object whose "text" is empty'
    return document, _surrogate(document)


def _kind(value: Any) -> str:
    """The type of a value in JSON's words."""
    return _KINDS[type(value)]


def _surrogate(document: str) -> str | None:
    """JSON can write half of a surrogate pair, which no UTF-8 can hold."""
    try:
        document.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(document[error.start]):04x}"
        return (
            f'an object whose "text" has {half}, half of a surrogate pair, at character '
            f"{error.start}"
        )
    return None
