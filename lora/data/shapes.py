"""What a record must have to be a row of some kind, and how its values are read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyggml.lora.data.messages import checked_text
from pyggml.lora.data.rows import BadRow, Place, Row

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """A set of names that a record must have, names that it may have, and their row."""

    names: tuple[str, ...]
    make: Callable[[Place, Record], Row]
    others: tuple[str, ...] = ()  # read if they are there


def read_value(record: Record, name: str, read: Callable[[Any], Any]) -> Any:
    """What `read` makes of the value of a name; its complaint says of what name."""
    try:
        return read(record.get(name))
    except BadRow as bad:
        raise BadRow(f'is an object whose "{name}" {bad}') from None


def read_text(record: Record, name: str, may_be_empty: bool = False) -> str:
    """The text of a name. BadRow if it is none that a tokenizer can read."""
    text: str = read_value(record, name, lambda value: checked_text(value, may_be_empty))
    return text
