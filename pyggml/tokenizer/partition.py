"""Text → special tokens and the pieces between them; the first step of encoding.

The whole text is searched for the longest special token, then for the next: with tokens "abcd" and
"xab", "xabcd" is cut into "x" and "abcd". This is llama.cpp's order (tokenizer_st_partition); a
search from left to right would find "xab".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

SPACES = " \t\n\v\f\r"  # C's isspace


@dataclass(frozen=True, slots=True)
class Special:
    """A special token.

    hidden           a control or unknown token: matched only with parse_special
    lstrip, rstrip   the match includes the spaces on its left, on its right
    """

    text: str
    id: int
    hidden: bool
    lstrip: bool = False
    rstrip: bool = False


def in_order(specials: Iterable[Special]) -> tuple[Special, ...]:
    """Special tokens in the order for `partition`: longest first, in bytes, then by id."""
    return tuple(sorted(specials, key=lambda special: (-len(special.text.encode()), special.id)))


def partition(text: str, specials: Iterable[Special], parse_special: bool) -> list[str | int]:
    """The text in order, as non-empty pieces (str) and special tokens (ids)."""
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
