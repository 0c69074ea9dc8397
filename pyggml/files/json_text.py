"""JSON as it is read here: each name once in an object; why a text is none, with the place; and
numbers that it has."""

import json
from math import isfinite
from pathlib import Path
from typing import Any

from pyggml.files.reading import read_bytes

SPACE = " \t\r\n"


def place_in(text: str, at: int, first: tuple[int, int]) -> tuple[int, int]:
    """Line and column, from 1, of a character; `first`: those of the text's first one."""
    n_lines, last = text.count("\n", 0, at), text.rfind("\n", 0, at)
    return first[0] + n_lines, at - last if n_lines else first[1] + at


def lonely(comma: str) -> str:
    return f"the comma at {comma} has nothing after it"


def reason_of(error: Exception, first: tuple[int, int] | None = None) -> str:
    """Why a text is no JSON. first: line and column of its first character; None: it is a line."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    text, at = error.doc, error.pos

    def where(i: int) -> str:
        line, column = place_in(text, i, first or (1, 1))
        return f"line {line}, column {column}" if first else f"column {column}"

    before = at if text[at : at + 1] == "," else len(text[:at].rstrip(SPACE)) - 1
    if text[before : before + 1] == "," and text[before + 1 :].lstrip(SPACE)[:1] in ("}", "]"):
        return lonely(where(before))
    return f"{error.msg.removesuffix(' at')} at {where(at)}"


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. ValueError for a name that is given twice: which one was meant, nobody knows."""
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice[:20]!r} stands twice in one object")
    return record


def read_object(path: Path, most_bytes: int) -> dict[str, Any]:
    """The object that a file holds; an empty one if there is none, or the file has more bytes."""
    try:
        value = json.loads(read_bytes(path, most_bytes))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def finite(x: float, digits: int | None = None) -> float | None:
    """A number as JSON has it, to as many digits: None for what is not finite."""
    if not isfinite(x):
        return None
    return float(x) if digits is None else float(f"{x:.{digits}g}")


DECODER = json.JSONDecoder(object_pairs_hook=once)
