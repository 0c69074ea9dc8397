"""A guess at the columns of a record whose names no row has: `--columns prompt=q,completion=a`."""

from collections.abc import Mapping, Sequence
from typing import Any

from pyggml.chat.messages import is_message

# Words that names of each part have, the likeliest first; also of German, French and Spanish.
_WORDS = {
    "prompt": "prompt question query instruction input request user human frage demande pregunta",
    "completion": "completion response answer output reply assistant target "
    "antwort réponse reponse respuesta",
    "chosen": "chosen preferred accepted better good win positive",
    "rejected": "rejected worse bad lose negative",
    "label": "label thumb rating wanted good",
}
_PARTS: Mapping[str, Sequence[str]] = {
    "training": ("prompt", "completion"),
    "pairs": ("prompt", "chosen", "rejected"),
    "labels": ("prompt", "completion", "label"),
}


def suggestion(record: Mapping[str, Any], purpose: str) -> str:
    """The columns as an option takes them; "" if it is not clear what they are.

    A list of messages is one, and a text alone too. Else each part is the column whose name has one
    of its words; of two texts for training, the first is the prompt.
    """
    lists = {name: value for name, value in record.items() if isinstance(value, list)}
    chats = [name for name, value in lists.items() if any(map(is_message, value[:1]))]
    if purpose == "training" and chats:
        return f"messages={chats[0]}"
    texts = [name for name, value in record.items() if isinstance(value, str) and value.strip()]
    if purpose == "training" and len(texts) == 1:
        return f"text={texts[0]}"
    parts = _PARTS.get(purpose, ())
    names = {part: _column_of(part, [*record]) for part in parts}
    if purpose == "training" and len(texts) == 2 and None in names.values():
        names = dict(zip(parts, texts, strict=True))
    columns = [f"{part}={name}" for part, name in names.items()]
    whole = None not in names.values() and len({*names.values()}) == len(columns)
    return ",".join(columns) if columns and whole else ""


def _column_of(part: str, names: Sequence[str]) -> str | None:
    """The column whose name has a word of this part."""
    return next((n for word in _WORDS[part].split() for n in names if word in str(n).lower()), None)
