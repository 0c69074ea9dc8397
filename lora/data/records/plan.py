"""How records with the same names are read, as most of a file have; and that nothing of them is
lost."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyggml.chat.messages import BadValue
from pyggml.lora.data.records.names import LETTERS, Names, meaning_of
from pyggml.lora.data.records.rows import Row, texts_of
from pyggml.lora.data.records.shape import Cells, Shape, is_empty

_LONG = 20  # characters of a text that stands in another by no chance


@dataclass(frozen=True, slots=True)
class RecordPlan:
    """A shape, and the columns of its parts under these names.

    first      part → its first column
    several    parts of which there are several columns: the first that says anything counts
    meanings   columns that may be left over → what their names mean
    strangers  those whose names mean nothing
    """

    shape: Shape
    first: Mapping[str, str]
    several: Mapping[str, Names]
    meanings: Mapping[str, str]
    strangers: tuple[str, ...]

    @staticmethod
    def of(shape: Shape, names: Collection[str]) -> RecordPlan:
        columns = shape.columns(names)
        first = {part: each[0] for part, each in columns.items()}
        several = {part: each for part, each in columns.items() if len(each) > 1}
        certain = {name for part, name in first.items() if part not in several}
        left = [name for name in names if name not in certain]
        meanings = {name: meaning for name in left if (meaning := _meaning(name, names))}
        strangers = tuple(name for name in left if name not in meanings)
        return RecordPlan(shape, first, several, meanings, strangers)

    def cells(self, record: Mapping[str, Any]) -> Cells:
        """The values of a record, by part."""
        if not self.several:
            return Cells(record, self.first)
        says = {
            part: next((name for name in columns if not is_empty(record[name])), columns[0])
            for part, columns in self.several.items()
        }
        return Cells(record, {**self.first, **says})

    def decisive(self, cells: Cells) -> str:
        """The columns by which the record has this shape: prompt and completion."""
        return " and ".join(cells.names[part[0]] for part in self.shape.parts)

    def unread(self, cells: Cells) -> list[str]:
        """The columns that the row is not made of, and whose names mean nothing."""
        read = cells.names.values() if self.several else ()
        return [name for name in self.strangers if name not in read]

    def check_nothing_lost(self, record: Mapping[str, Any], cells: Cells, row: Row | None) -> None:
        """BadValue for a record with a column of known meaning that its row has not read, unless
        the column is empty or repeats what was read. None: of a record without a row, its lists."""
        if not self.meanings:
            return
        read = {*cells.names.values()}
        left = [n for n in self.meanings if n not in read and not is_empty(record[n])]
        if row is None:
            left = [name for name in left if type(record[name]) is list]
        texts = [_plain(text) for text in texts_of(row)] if row and left else []
        for name in left:
            if not _repeats(record[name], texts):
                raise self._lost(name, cells)

    def _lost(self, name: str, cells: Cells) -> BadValue:
        columns = [f"{part}={column}" for part, column in cells.names.items() if cells.has(part)]
        fault = f'has "{name}", {self.meanings[name]}, beside {self.decisive(cells)}'
        return BadValue(f"{fault}: --columns {','.join(columns)} reads these alone", says_all=True)


def _meaning(name: Any, names: Collection[Any]) -> str:
    """What a column's name means; a letter means a choice only where there are two."""
    if name in LETTERS and not {*LETTERS[:2]} <= {*names}:
        return ""
    return meaning_of(str(name))


def _repeats(value: Any, texts: Sequence[str]) -> bool:
    """Whether a value says what these texts say: each of its texts is one of them, lies in one, or
    holds them all, as the whole row in a template's words does."""
    if isinstance(value, dict):
        content = [value[name] for name in ("content", "value") if name in value]
        return all(_repeats(inner, texts) for inner in content or value.values())
    if isinstance(value, list):
        return all(_repeats(inner, texts) for inner in value)
    if not isinstance(value, str):
        return value is None
    text = _plain(value)
    within = len(text) >= _LONG and any(text in other for other in texts)
    holds = len(texts) > 1 and all(re.search(rf"(?<!\w){re.escape(t)}(?!\w)", text) for t in texts)
    return not text or text in texts or within or holds


def _plain(text: str) -> str:
    return " ".join(text.split())
