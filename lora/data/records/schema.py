"""Which kind of row a record is: the first whose names it has.

A column map gives names of the file for the parts of rows.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from pyggml.chat.messages import BadValue, kind_of
from pyggml.errors import ConfigError
from pyggml.lora.data.records.classes import CLASS_SHAPES
from pyggml.lora.data.records.columns import suggestion
from pyggml.lora.data.records.groups import GROUP_SHAPES
from pyggml.lora.data.records.names import meaning_of
from pyggml.lora.data.records.plan import RecordPlan
from pyggml.lora.data.records.preferences import LABEL_SHAPES, PAIR_SHAPES
from pyggml.lora.data.records.prompts import PROMPT_SHAPES
from pyggml.lora.data.records.questions import QUESTION_SHAPES
from pyggml.lora.data.records.rows import PromptRow, Row, RowPlace
from pyggml.lora.data.records.shape import Shape
from pyggml.lora.data.records.training import TRAINING_SHAPES

SHAPES: Mapping[str, tuple[Shape, ...]] = {
    "training": TRAINING_SHAPES,
    "pairs": PAIR_SHAPES,
    "labels": LABEL_SHAPES,
    "question": QUESTION_SHAPES,
    "prompts": PROMPT_SHAPES,
    "classes": CLASS_SHAPES,
    "groups": GROUP_SHAPES,
}
_FIRST = {"training": "text", "pairs": "chosen", "labels": "prompt", "question": "question"}
_FIRST |= {"prompts": "prompt", "classes": "text", "groups": "anchor"}
_LEARNED = {  # what a row of another purpose is for
    "training": "--objective sft learns to write",
    "pairs": "--objective dpo (or orpo, simpo, ipo) learns to prefer",
    "labels": "--objective kto learns from",
    "question": "`pyggml eval` asks",
    "classes": "--objective classify learns from",
    "groups": "--objective embed learns from",
}
_WANTED = {
    "training": '"text" that is not empty, or with "prompt" and "completion" (or "question" and '
    '"answer", "input" and "output"), or "messages", or "conversations", or "instruction" and '
    '"output"',
    "pairs": '"chosen" and "rejected", which differ',
    "labels": '"prompt" and "completion", and a "label" that is true or false',
    "question": '"question" or "prompt", with a list "choices" and an "answer"',
    "prompts": '"prompt" (or "question", "input", "instruction", or "messages")',
    "classes": '"text" that is not empty, and its "label"',
    "groups": '"anchor" and a "positive", neither empty',
}
NAMES = frozenset(name for shapes in SHAPES.values() for shape in shapes for name in shape.names)


@dataclass(frozen=True, slots=True)
class Schema:
    """The kind of rows wanted, and the names of their parts in the files.

    purpose   "training", "pairs", "labels", "question", "prompts", "classes" or
              "groups"
    columns   name of a row → name in the file; if given, no other names are read
    """

    purpose: str = "training"
    columns: tuple[tuple[str, str], ...] = ()

    @property
    def names_sought(self) -> str:
        """What a faulty row lacks, as the end of a sentence."""
        if self.columns:
            names = " and ".join(f'"{column}" ({name})' for name, column in self.columns)
            return f"wanted one JSON object with {names} on each line"
        what = f"wanted one JSON object with a string {_WANTED[self.purpose]}, on each line"
        return f"{what}; --columns maps other names to these"

    @property
    def columns_sought(self) -> str:
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
        return any(shape.fits(fields) for shapes in SHAPES.values() for shape in shapes)

    def fits(self, record: Mapping[str, Any]) -> bool:
        """Whether a record has the names of a row of this purpose."""
        fields = self._rename(record)
        return any(shape.fits(fields) for shape in SHAPES[self.purpose])

    def row(self, place: RowPlace, record: Any) -> Row:
        """The row of a record.

        Raises BadValue for a record without the names or values wanted, and for one that says more
        than its row.
        """
        if not isinstance(record, dict):
            raise BadValue(f"is a JSON {kind_of(record)}")
        fields = self._rename(record)
        plan = _plan(self, tuple(fields))
        if plan is None:
            raise self._missing(record, fields)
        cells = plan.cells(fields)
        if self.columns or self.purpose == "prompts":
            row = plan.shape.make(place, cells)
            return replace(row, columns=record) if isinstance(row, PromptRow) else row
        try:
            row = plan.shape.make(place, cells)
        except BadValue:  # that an answer is no text is no help where it belongs to a question
            plan.check_nothing_lost(fields, cells, None)
            raise
        plan.check_nothing_lost(fields, cells, row)
        return row

    def unread(self, record: Mapping[str, Any]) -> list[str]:
        """The names of a record that its row is not made of, and that need not be told otherwise:
        a name with a meaning says nothing, or what the row says too."""
        fields = self._rename(record)
        plan = _plan(self, tuple(fields))
        if plan is None:
            return [*record]
        if self.purpose == "prompts":  # what judges the answers has all of it
            return []
        cells = plan.cells(fields)
        if not self.columns:
            return plan.unread(cells)
        read = {column for name, column in self.columns if name in cells.names.values()}
        return [name for name in record if name not in read]

    def _missing(self, record: Mapping[str, Any], fields: Mapping[str, Any]) -> BadValue:
        """What to say of a record without the names of a row."""
        for purpose in ("pairs", "labels", "question", "classes", "groups", "training"):
            shape = next((s for s in SHAPES[purpose] if s.fits(fields)), None)
            if shape is not None and purpose != self.purpose:
                plan = RecordPlan.of(shape, fields)
                names = plan.decisive(plan.cells(fields))
                return BadValue(f"has {names}, which {_LEARNED[purpose]}", says_all=True)
        there = ", ".join(str(key)[:20] for key in list(record)[:5]) or "nothing"
        lists = {n: v for n, v in record.items() if isinstance(v, list) and v}
        if holds := [n for n, v in lists.items() if isinstance(v[0], dict) and self.has_row(v[0])]:
            fault = f'is an object with rows in its "{holds[0][:20]}" (it has {there})'
            way = f"wanted that list alone, as `jq .{holds[0][:20]} FILE` writes it"
            return BadValue(f"{fault}, {way}", says_all=True)
        missing = _FIRST[self.purpose]
        missing = next((column for _, column in self.columns if column not in record), missing)
        return BadValue(f'is an object without "{missing}" (it has {there}){self.suggest(record)}')

    def suggest(self, record: Mapping[str, Any]) -> str:
        """Ready columns for a record of other names, as the end of a sentence; "" if unclear."""
        columns = "" if self.columns else suggestion(record, self.purpose)
        return f": --columns {columns} may be meant" if columns else ""

    def _rename(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self.columns:
            return record
        return {name: record[column] for name, column in self.columns if column in record}


@lru_cache(maxsize=8)  # the records of a file have the same few names
def _plan(schema: Schema, names: tuple[str, ...]) -> RecordPlan | None:
    """How records with these names are read: by the first shape whose names are all there."""
    shape = next((shape for shape in SHAPES[schema.purpose] if shape.fits(names)), None)
    return None if shape is None else RecordPlan.of(shape, names)


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
        fault = f"gives a row the name {unknown[0][:20]!r}"
        raise ConfigError([("columns", f"{fault}, wanted some of {', '.join(sorted(NAMES))}")])
    if names and not any(shape.fits(names) for shape in SHAPES[purpose]):
        rows = "; or ".join(dict.fromkeys(map(str, SHAPES[purpose])))
        raise ConfigError([("columns", f"gives {', '.join(sorted(names))}, wanted {rows}")])
    return Schema(purpose, pairs)
