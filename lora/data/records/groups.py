"""Records of a text and another that is near to it, and of some that are not.

parts                            row
anchor, positive [negative]      GroupRow; "negative" a text or a list of them
"""

from typing import Any

from pyggml.chat.messages import BadValue, checked_text
from pyggml.lora.data.records.names import ANCHOR, NEGATIVE, POSITIVE
from pyggml.lora.data.records.rows import GroupRow, RowPlace
from pyggml.lora.data.records.shape import Cells, Shape, is_empty


def _of_group(place: RowPlace, cells: Cells) -> GroupRow:
    anchor, positive = cells.text("anchor"), cells.text("positive")
    negatives: tuple[str, ...] = cells.read("negative", _texts) if cells.has("negative") else ()
    if positive in negatives:
        name = cells.names["negative"]
        raise BadValue(f'is an object whose "{name}" has the positive text too')
    return GroupRow(place, anchor, positive, negatives)


def _texts(value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(checked_text(v, may_be_empty=False) for v in values if not is_empty(v))


GROUP_SHAPES = (Shape((ANCHOR, POSITIVE), _of_group, (NEGATIVE,)),)
