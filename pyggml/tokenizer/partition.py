"""A text cut at its special tokens, before anything else looks at it.

Longest token first, over the whole text: "abcd" is found in "xabcd" although "xab" would begin
earlier. That is llama.cpp's order (tokenizer_st_partition); a search from left to right differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

SPACES = " \t\n\v\f\r"  # C's isspace


@dataclass(frozen=True, slots=True)
class Special:
    """A token matched in text. It swallows spaces on its left or right where so marked.

    A `hidden` one (control or unknown) is matched only where special tokens are to be parsed.
    """

    text: str
    id: int
    hidden: bool
    lstrip: bool = False
    rstrip: bool = False


def in_order(specials: Iterable[Special]) -> tuple[Special, ...]:
    """Longest first in bytes, as `partition` wants them; of equals, the lower id first."""
    return tuple(sorted(specials, key=lambda special: (-len(special.text.encode()), special.id)))


def partition(text: str, specials: Iterable[Special], parse_special: bool) -> list[str | int]:
    """Non-empty pieces of text and ids of special tokens, in order of the text."""
    parts: list[str | int] = [text] if text else []
    for special in specials:
        if (special.hidden and not parse_special) or special.text not in text:
            continue
        cut: list[str | int] = []
        for part in parts:
            cut.extend(_cut(part, special) if isinstance(part, str) else (part,))
        parts = cut
    return parts


def _cut(text: str, special: Special) -> Iterator[str | int]:
    start = 0
    while (at := text.find(special.text, start)) >= 0:
        left = text[start:at].rstrip(SPACES) if special.lstrip else text[start:at]
        if left:
            yield left
        yield special.id
        start = at + len(special.text)
        while special.rstrip and start < len(text) and text[start] in SPACES:
            start += 1
    if start < len(text):
        yield text[start:]
