"""What a record must have to be a row of some kind, and how its values are read."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pyggml.chat.messages import BadValue, checked_text
from pyggml.lora.data.records.names import Names
from pyggml.lora.data.records.rows import Row, RowPlace


def is_empty(value: Any) -> bool:
    """Whether a value says nothing: null, white space, or a list or an object of nothing."""
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}")
    return value is None or (isinstance(value, list | dict) and not value)


class Cells:
    """The values of a record by the parts of a row. `names` are the parts' in the file."""

    def __init__(self, record: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self._record, self.names = record, names

    def __contains__(self, part: str) -> bool:
        return part in self.names

    def get(self, part: str) -> Any:
        """The value; None where there is none."""
        name = self.names.get(part)
        return None if name is None else self._record.get(name)

    def has(self, part: str) -> bool:
        """Whether it says anything."""
        return not is_empty(self.get(part))

    def holds_messages(self, part: str) -> bool:
        """Whether it is no text, but a list of messages or one of them."""
        return isinstance(self.get(part), list | dict)

    def read(self, part: str, read: Callable[[Any], Any]) -> Any:
        """What `read` makes of a value; its complaint says of what name."""
        try:
            return read(self.get(part))
        except BadValue as bad:
            raise BadValue(f'is an object whose "{self.names.get(part, part)}" {bad}') from None

    def text(self, part: str, may_be_empty: bool = False) -> str:
        """A text. BadValue if it is none that a tokenizer can read."""
        text: str = self.read(part, lambda value: checked_text(value, may_be_empty))
        return text


@dataclass(frozen=True, slots=True)
class Shape:
    """Parts that a record must have, each under one of its names, parts that it may have, and the
    row of their cells."""

    parts: tuple[Names, ...]
    make: Callable[[RowPlace, Cells], Row]
    extras: tuple[Names, ...] = ()

    def fits(self, names: Collection[str]) -> bool:
        """Whether these names of a file have all that it must have."""
        return all(any(name in names for name in part) for part in self.parts)

    def columns(self, names: Collection[str]) -> dict[str, Names]:
        """Part → those of its names that are among these."""
        every = (*self.parts, *self.extras)
        columns = {part[0]: tuple(name for name in part if name in names) for part in every}
        return {part: each for part, each in columns.items() if each}

    @property
    def names(self) -> frozenset[str]:
        """All names that it reads."""
        return frozenset(name for part in (*self.parts, *self.extras) for name in part)

    def __str__(self) -> str:
        return " and ".join(part[0] for part in self.parts)
