"""Which kind of row a record is: the first whose names it has; and that nothing it says is lost.

A column map gives names of the file for the parts of rows.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyggml.errors import ConfigError
from pyggml.lora.data.messages import kind_of
from pyggml.lora.data.names import LETTERS, meaning_of
from pyggml.lora.data.records.columns import suggestion
from pyggml.lora.data.records.preferences import LABEL_SHAPES, PAIR_SHAPES
from pyggml.lora.data.records.questions import QUESTION_SHAPES
from pyggml.lora.data.records.shape import Cells, Record, Shape, is_empty
from pyggml.lora.data.records.training import TRAINING_SHAPES
from pyggml.lora.data.rows import BadRow, Place, Row, texts_of

SHAPES: Mapping[str, tuple[Shape, ...]] = {
    "training": TRAINING_SHAPES,
    "pairs": PAIR_SHAPES,
    "labels": LABEL_SHAPES,
    "question": QUESTION_SHAPES,
}
_LONG = 20  # characters of a text that stands in another by no chance
_FIRST = {"training": "text", "pairs": "chosen", "labels": "prompt", "question": "question"}
_LEARNED = {  # what a row of another purpose is for
    "training": "--objective sft learns to write",
    "pairs": "--objective dpo (or orpo, simpo, ipo) learns to prefer",
    "labels": "--objective kto learns from",
    "question": "`pyggml eval` asks",
}
_WANTED = {
    "training": '"text" that is not empty, or with "prompt" and "completion" (or "question" and '
    '"answer", "input" and "output"), or "messages", or "conversations", or "instruction" and '
    '"output"',
    "pairs": '"chosen" and "rejected", which differ',
    "labels": '"prompt" and "completion", and a "label" that is true or false',
    "question": '"question" or "prompt", with a list "choices" and an "answer"',
}
NAMES = frozenset(name for some in SHAPES.values() for shape in some for name in shape.names)


@dataclass(frozen=True, slots=True)
class Schema:
    """The kind of rows wanted, and the names of their parts in the files.

    purpose   "training", "pairs", "labels" or "question"
    columns   name of a row → name in the file; if given, no other names are read
    """

    purpose: str = "training"
    columns: tuple[tuple[str, str], ...] = ()

    @property
    def wanted(self) -> str:
        """What a faulty row lacks: the names wanted."""
        if self.columns:
            names = " and ".join(f'"{column}" ({name})' for name, column in self.columns)
            return f"wanted one JSON object with {names} on each line"
        what = f"wanted one JSON object with a string {_WANTED[self.purpose]}, on each line"
        return f"{what}; --columns maps other names to these"

    @property
    def wanted_columns(self) -> str:
        """Which columns a table should have had."""
        if self.columns:
            return f"wanted {', '.join(sorted(column for _, column in self.columns))} among them"
        rows = dict.fromkeys(map(str, sorted(SHAPES[self.purpose], key=lambda s: len(str(s)))))
        return f"wanted {', or '.join(rows)}, among them"

    def may_read(self, name: str) -> bool:
        """Whether a column of this name in the file may say something of a row."""
        if self.columns:
            return any(name == column for _, column in self.columns)
        return name in NAMES or bool(meaning_of(name))

    def has_row(self, names: Collection[str]) -> bool:
        """Whether these names of a file make a row, of whatever purpose."""
        fields = self._rename(dict.fromkeys(names))
        return any(shape.fits(fields) for some in SHAPES.values() for shape in some)

    def fits(self, record: Mapping[str, Any]) -> bool:
        """Whether a record has the names of a row of this purpose."""
        return self._shape(self._rename(record)) is not None

    def row(self, place: Place, record: Any) -> Row:
        """The row of a record.

        Raises BadRow for a record without the names or values wanted, and for one that says more
        than its row.
        """
        if not isinstance(record, dict):
            raise BadRow(f"is a JSON {kind_of(record)}")
        fields = self._rename(record)
        shape = self._shape(fields)
        if shape is None:
            raise self._missing(record, fields)
        cells = shape.cells(fields)
        if self.columns:
            return shape.make(place, cells)
        try:
            row = shape.make(place, cells)
        except BadRow:  # that an answer is no text is no help where it belongs to a question
            lists = {
                n: v for n, v in fields.items() if n in cells.names.values() or type(v) is list
            }
            _check_nothing_lost(lists, shape, cells, None)
            raise
        _check_nothing_lost(fields, shape, cells, row)
        return row

    def unread(self, record: Mapping[str, Any]) -> list[str]:
        """The names of a record that its row is not made of, and that need not be told otherwise:
        a name with a meaning says nothing, or what the row says too."""
        fields = self._rename(record)
        shape = self._shape(fields)
        read = {*shape.cells(fields).names.values()} if shape else set()
        if self.columns:
            read = {column for name, column in self.columns if name in read}
            return [name for name in record if name not in read]
        return [name for name in record if name not in read and not _meaning(name, record)]

    def _shape(self, fields: Record) -> Shape | None:
        """The first shape whose names are all there."""
        return next((shape for shape in SHAPES[self.purpose] if shape.fits(fields)), None)

    def _missing(self, record: Mapping[str, Any], fields: Record) -> BadRow:
        """What to say of a record without the names of a row."""
        for purpose in ("pairs", "labels", "question", "training"):
            shape = next((s for s in SHAPES[purpose] if s.fits(fields)), None)
            if shape is not None and purpose != self.purpose:
                fault = f"has {_names_of(shape, fields)}, which {_LEARNED[purpose]}"
                return BadRow(fault, says_all=True)
        there = ", ".join(str(key)[:20] for key in list(record)[:5]) or "nothing"
        if holds := [name for name, value in record.items() if self._are_rows(value)]:
            fault = f'is an object with rows in its "{holds[0][:20]}" (it has {there})'
            wanted = f"wanted that list alone, as `jq .{holds[0][:20]} FILE` writes it"
            return BadRow(f"{fault}, {wanted}", says_all=True)
        missing = _FIRST[self.purpose]
        missing = next((column for _, column in self.columns if column not in record), missing)
        return BadRow(f'is an object without "{missing}" (it has {there}){self.suggest(record)}')

    def _are_rows(self, value: Any) -> bool:
        first = value[0] if isinstance(value, list) and value else None
        return isinstance(first, dict) and self.has_row(first)

    def suggest(self, record: Mapping[str, Any]) -> str:
        """Ready columns for a record of other names, as the end of a sentence; "" if unclear."""
        columns = "" if self.columns else suggestion(record, self.purpose)
        return f": --columns {columns} may be meant" if columns else ""

    def _rename(self, record: Mapping[str, Any]) -> Record:
        if not self.columns:
            return dict(record)
        return {name: record[column] for name, column in self.columns if column in record}


# -- nothing is lost ----------------------------------------------------------------------------


def _check_nothing_lost(fields: Record, shape: Shape, cells: Cells, row: Row | None) -> None:
    """BadRow for a record with a column of known meaning that its row has not read, unless the
    column is empty or repeats what was read."""
    read = {*cells.names.values()}
    others = [name for name in fields if name not in read and not is_empty(fields[name])]
    meanings = {name: meaning for name in others if (meaning := _meaning(name, fields))}
    parts = [_plain(text) for text in texts_of(row)] if row and meanings else []
    for name, meaning in meanings.items():
        if not _repeats(fields[name], parts):
            raise _lost(name, meaning, fields, shape, cells)


def _lost(name: str, meaning: str, fields: Record, shape: Shape, cells: Cells) -> BadRow:
    read = [f"{part}={column}" for part, column in cells.names.items() if cells.has(part)]
    fault = f'has "{name}", {meaning}, beside {_names_of(shape, fields)}'
    return BadRow(f"{fault}: --columns {','.join(read)} reads these alone", says_all=True)


def _names_of(shape: Shape, fields: Record) -> str:
    names = shape.cells(fields).names
    return " and ".join(names[part[0]] for part in shape.parts)


def _meaning(name: Any, record: Collection[Any]) -> str:
    """What a column's name means; a letter means a choice only where there are two."""
    if name in LETTERS and not {*LETTERS[:2]} <= {*record}:
        return ""
    return meaning_of(str(name))


def _repeats(value: Any, parts: Sequence[str]) -> bool:
    """Whether a value says what these parts say: each of its texts is one of them, lies in one, or
    holds them all, as the whole row in a template's words does."""
    if isinstance(value, dict):
        said = [value[name] for name in ("content", "value") if name in value]
        return all(_repeats(inner, parts) for inner in said or value.values())
    if isinstance(value, list):
        return all(_repeats(inner, parts) for inner in value)
    if not isinstance(value, str):
        return value is None
    text = _plain(value)
    within = len(text) >= _LONG and any(text in part for part in parts)
    holds = len(parts) > 1 and all(re.search(rf"(?<!\w){re.escape(p)}(?!\w)", text) for p in parts)
    return not text or text in parts or within or holds


def _plain(text: str) -> str:
    return " ".join(text.split())


TRAINING = Schema()


def schema_of(columns: Sequence[str] | None, purpose: str = "training") -> Schema:
    """A column map, each word such as `prompt=question`, for rows of this purpose.

    Raises ConfigError for names of which no row is made.
    """
    cut = [column.partition("=") for column in columns or ()]
    pairs = tuple((name.strip(), column.strip()) for name, _, column in cut)
    names = {name for name, _ in pairs}
    unknown = sorted(names - NAMES)
    if unknown:
        some = f"{unknown[0][:20]!r}, wanted some of {', '.join(sorted(NAMES))}"
        raise ConfigError([("columns", f"gives a row the name {some}")])
    if names and not any(shape.fits(names) for shape in SHAPES[purpose]):
        rows = "; or ".join(dict.fromkeys(map(str, SHAPES[purpose])))
        raise ConfigError([("columns", f"gives {', '.join(sorted(names))}, wanted {rows}")])
    return Schema(purpose, pairs)
