"""Chats in files → messages that are to be answered, or gone on with.

A record is an object as training has it, {"messages": [...], "tools": [...]}, with "conversations"
and "system" too, but needs no answer; or a file of JSON is one list of messages.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyggml.errors import DataError
from pyggml.lora.data.files import format_of, records
from pyggml.lora.data.messages import kind_of, messages_of, tools_of
from pyggml.lora.data.records import TRAINING
from pyggml.lora.data.rows import BadRow, Messages, Place

_NAMES = ("messages", "conversations")
_WANTED = 'wanted {"messages": [{"role": "user", "content": "..."}]}, as JSON or JSON Lines'


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, and the functions that the assistant may call."""

    place: Place
    messages: Messages
    tools: tuple[dict[str, Any], ...]


def read_chats(path: Path) -> list[Chat]:
    """The chats of a file, one at least. Raises DataError with the first that is none."""
    kind = format_of(path, TRAINING)
    if kind not in ("JSON", "JSON Lines"):
        raise DataError(f"{path}: is {kind}, {_WANTED}")
    rows = [*records(path, kind, TRAINING)]
    values = [value for _, value in rows]
    if kind == "JSON" and values and all(_is_message(value) for value in values):
        rows = [(rows[0][0], {"messages": values})]
    if not rows:
        raise DataError(f"{path}: has no chats; {_WANTED}")
    try:
        return [_chat(place, value) for place, value in rows]
    except BadRow as bad:
        raise DataError(f"{path}: {bad}; {_WANTED}") from None


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and ("role" in value or "from" in value)


def _chat(place: Place, value: Any) -> Chat:
    try:
        if isinstance(value, BadRow):
            raise value
        if not isinstance(value, dict):
            raise BadRow(f"is a {kind_of(value)}")
        name = next((name for name in _NAMES if name in value), None)
        if name is None:
            raise BadRow('has no "messages"')
        messages, _ = messages_of(value[name])
        if value.get("system"):
            messages = (
                *messages_of([{"role": "system", "content": value["system"]}])[0],
                *messages,
            )
        return Chat(place, messages, tools_of(value.get("tools")))
    except BadRow as bad:
        raise BadRow(bad.at(place)) from None
