"""Docstrings → Markdown for the reference: columns become tables, names become links.

A docstring is text for a terminal. Its formulas must not become emphasis, nor its columns one
paragraph. Griffe loads this extension by mkdocs.yml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from itertools import groupby
from textwrap import dedent
from typing import Any

from griffe import (
    Alias,
    Attribute,
    Class,
    Docstring,
    Extension,
    Function,
    Module,
    NameResolutionError,
    Object,
)

_GAP = re.compile(r"(?<=\S)(?: {2,}|\t)(?=\S)")  # between two columns
_FIRST = re.compile(r"[\w., *-]+")  # what the first column holds: names
_CODE = re.compile(r"`([^`]+)`")
_SPECIAL = re.compile(r"([\\*_\[\]#{}])")
_ITEM = re.compile(r"(?:- |\d+\. )")
_NAME = re.compile(r"[A-Za-z_][\w.]*")


class Docstrings(Extension):
    """Rewrites every docstring of a package once it is loaded, so that names can be looked up."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        for thing in _inside(pkg):
            if isinstance(thing, Attribute) and _is_choice(thing):
                thing.docstring = Docstring(str(thing.value).strip("\"'"))
            if thing.docstring:
                thing.docstring.value = markdown(thing.docstring.value, thing)


def _is_choice(thing: Attribute) -> bool:
    """A member of an enumeration, whose value says what it means."""
    owner = thing.parent
    enum = isinstance(owner, Class) and any(str(b) in ("Enum", "StrEnum") for b in owner.bases)
    return enum and not thing.docstring and str(thing.value)[:1] in "\"'"


def _inside(thing: Object) -> Iterator[Object]:
    yield thing
    for member in thing.members.values():
        if not isinstance(member, Alias):
            yield from _inside(member)


def markdown(text: str, thing: Object) -> str:
    """The docstring of a thing as Markdown."""
    lines = text.splitlines()
    blocks = [list(b) for blank, b in groupby(lines, lambda line: not line.strip()) if not blank]
    return "\n\n".join(_block(b, thing) for b in blocks)


def _block(lines: list[str], thing: Object) -> str:
    """One paragraph: columns, else code if it is indented, a list, or prose."""
    flush = dedent("\n".join(lines)).splitlines()
    if _has_columns(flush):
        return _table(flush, thing)
    if lines[0].startswith("    "):
        return "\n".join(lines)
    parts = list[str]()
    for line in lines:
        name = _argument(line, thing)
        if name or _GAP.search(line) or _ITEM.match(line) or line.startswith(("  ", "Raises ")):
            parts.append("")  # arguments, formulas and errors begin a paragraph
        start = f"`{name}`" if name else ""
        parts.append(start + _words(line.removeprefix(name), thing))
    return "\n".join(parts).strip()


def _argument(line: str, thing: Object) -> str:
    """The argument of a function that a line tells about: "name: what it means"."""
    name, colon, _ = line.partition(": ")
    known = isinstance(thing, Function) and name in thing.parameters
    return name if colon and known else ""


def _has_columns(lines: list[str]) -> bool:
    """Whether most lines begin with a name and a gap; those that end a cell are indented."""
    head = [line for line in lines if not line.startswith("  ")]
    named = [line for line in head if _FIRST.fullmatch(_GAP.split(line)[0]) and _GAP.search(line)]
    return len(named) > len(head) / 2


def _table(lines: list[str], thing: Object) -> str:
    rows = list[list[str]]()
    for line in lines:
        cells = _GAP.split(line.strip())
        if line.startswith("  ") and rows:  # the end of the cell above
            rows[-1][-1] += " " + " ".join(cells)
        elif len(cells) == 1 and rows and len(rows[-1]) > 1:
            rows.append([cells[0], ""])
        else:
            rows.append(cells)
    n = max(map(len, rows))
    head = ["|" + " |" * n, "|" + "---|" * n]
    padded = ([_words(c, thing, named=i == 0) for i, c in enumerate(row)] for row in rows)
    body = ["| " + " | ".join([*row, *[""] * (n - len(row))]) + " |" for row in padded]
    return "\n".join([*head, *body])


def _words(text: str, thing: Object, named: bool = False) -> str:
    """A line with everything but code kept from Markdown. named: what is one name is code."""
    if named and re.fullmatch(r"[\w., ]+", text):
        return f"`{text}`"
    parts = _CODE.split(text)
    parts[::2] = [_plain(p) for p in parts[::2]]
    parts[1::2] = [_code(p, thing) for p in parts[1::2]]
    return "".join(parts)


def _plain(text: str) -> str:
    item = _ITEM.match(text)
    start = item[0] if item else ""
    rest = _SPECIAL.sub(r"\\\1", text[len(start) :])
    return start + rest.replace("<", "&lt;").replace(">", "&gt;").replace("|", "&#124;")


def _code(text: str, thing: Object) -> str:
    """`name`, with a link where the name is something of the package."""
    code = f"<code>{escape(text).replace('|', '&#124;')}</code>"
    target = _target(text.removesuffix("()"), thing)
    return f'<autoref identifier="{target}" optional>{code}</autoref>' if target else code


def _target(name: str, thing: Object) -> str | None:
    if not _NAME.fullmatch(name):
        return None
    if name.startswith("pyggml"):
        return name
    try:
        return thing.resolve(name)
    except (NameResolutionError, KeyError, ValueError):
        return None
