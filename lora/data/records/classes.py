"""Records of a text and its class.

parts          row
text, label    ClassRow; the label a word, a number or true or false
"""

from typing import Any

from pyggml.chat.messages import BadValue, checked_text, kind_of
from pyggml.lora.data.records.names import CLASS, TEXT
from pyggml.lora.data.records.rows import ClassRow, RowPlace
from pyggml.lora.data.records.shape import Cells, Shape


def _of_class(place: RowPlace, cells: Cells) -> ClassRow:
    return ClassRow(place, cells.text("text"), cells.read("label", _label))


def _label(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, str):
        raise BadValue(f"is a {kind_of(value)}, wanted one label: a word or a whole number")
    return checked_text(value, may_be_empty=False).strip()


CLASS_SHAPES = (Shape((TEXT, CLASS), _of_class),)
