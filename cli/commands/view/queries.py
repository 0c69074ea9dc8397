"""The fields of a request → checked settings; every fault is told, and all at once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyggml.cli.web.errors import ApiError
from pyggml.lora import LoraConfig, TrainConfig

_MOST_DIGITS = 9
LONGEST_NAME = 500  # characters of a tensor's name, or of what is sought


@dataclass(frozen=True, slots=True)
class PassQuery:
    """What a graph computes: the logits of a window, a training pass over `batch` windows, or a
    pass of the small net, for which the other settings do not count.

    ctx       tokens of a window; 0: as many as a run has by default, and the model takes
    modules   matrices that are trained, with commas between them; "": all linear ones
    keep      what the backward pass reads: "costly" activations, or "layers", all else made again
    """

    kind: str = "training"
    ctx: int = 0
    batch: int = TrainConfig.batch
    rank: int = LoraConfig.rank
    modules: str = ""
    keep: str = "costly"


RANKS = (1, 256)
_NUMBERS = {"ctx": (2, 1 << 16), "batch": (1, 256), "rank": RANKS}
_WORDS = {"kind": ("logits", "training", "net"), "keep": ("costly", "layers")}


@dataclass(frozen=True, slots=True)
class TextQuery:
    """What is asked of a text.

    text     it; "" where none is needed
    run      the run whose adapter, or whole model, reads it; None: the file alone
    block    of the model, or a part of a graph; None where none was named
    at       a position of the text; None: the last one
    name     the activation in question
    other    another text, from which activations are taken
    """

    text: str
    run: str | None
    block: int | None
    at: int | None
    name: str
    other: str


MOST_CHARACTERS = 20_000  # of a text


def read_question(given: Mapping[str, Any], needs_text: bool = True) -> TextQuery:
    """Raises ApiError."""
    text, run, other = given.get("text"), given.get("run"), given.get("other", "")
    block, at, name = given.get("block"), given.get("at"), given.get("name", "")
    if not needs_text:
        text = ""
    elif not isinstance(text, str) or not 0 < len(text) <= MOST_CHARACTERS:
        fault = f"text is no string of 1 to {MOST_CHARACTERS} characters"
        raise ApiError(400, fault, "text")
    if not isinstance(other, str) or len(other) > MOST_CHARACTERS:
        raise ApiError(400, f"other is no string of at most {MOST_CHARACTERS} characters", "other")
    if not isinstance(name, str) or len(name) > LONGEST_NAME:
        raise ApiError(400, f"name is no string of at most {LONGEST_NAME} characters", "name")
    return TextQuery(
        text,
        run if isinstance(run, str) else None,
        block if type(block) is int else None,
        at if type(at) is int else None,
        name,
        other,
    )


def read_pass(query: Mapping[str, str]) -> PassQuery:
    """Raises ApiError."""
    faults: list[str] = []
    settings: dict[str, Any] = {}
    for name, (least, most) in _NUMBERS.items():
        if name in query:
            settings[name] = _number(query, name, least, most, faults)
    for name, choices in _WORDS.items():
        if query.get(name, choices[0]) not in choices:
            faults.append(f"{name} is {brief(query[name])}, wanted {' or '.join(choices)}")
    settings |= {name: query[name] for name in (*_WORDS, "modules") if name in query}
    if len(settings.get("modules", "")) > LONGEST_NAME:
        faults.append(f"modules has more than {LONGEST_NAME} characters")
    if faults:
        raise ApiError(400, "; ".join(faults))
    return PassQuery(**settings)


def read_number(query: Mapping[str, str], name: str, least: int, most: int) -> int:
    """Raises ApiError for what is no whole number in this range."""
    faults: list[str] = []
    number = _number(query, name, least, most, faults)
    if faults:
        raise ApiError(400, faults[0], name)
    return number


def read_text(query: Mapping[str, str], name: str) -> str:
    """Raises ApiError if it is missing or long."""
    text = query.get(name, "")
    if not 0 < len(text) <= LONGEST_NAME:
        raise ApiError(400, f"{name} has {len(text)} characters, wanted 1 to {LONGEST_NAME}", name)
    return text


def brief(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}…")


def _number(query: Mapping[str, str], name: str, least: int, most: int, faults: list[str]) -> int:
    word = query.get(name, "")
    is_number = word.isascii() and word.isdecimal() and len(word) <= _MOST_DIGITS
    if is_number and least <= int(word) <= most:
        return int(word)
    faults.append(f"{name} is {brief(word)}, wanted a whole number from {least} to {most}")
    return least
