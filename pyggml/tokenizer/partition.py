"""Text → special tokens and the pieces between them; the first step of encoding.

The whole text is searched for the longest special token, then for the next: with tokens "abcd" and
"xab", "xabcd" is cut into "x" and "abcd". This is llama.cpp's order (tokenizer_st_partition); a
search from left to right would find "xab".
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class TextPart(NamedTuple):
    """Characters [start, end) of a text: the name of a special token, or a piece of text (id None).

    Spaces that a match includes are in no part.
    """

    start: int
    end: int
    id: int | None = None


def partition(
    text: str,
    specials: Iterable[Special],
    parse_special: bool,
    plain: Sequence[tuple[int, int]] = (),
) -> list[TextPart]:
    """The text in order, as non-empty pieces and special tokens.

    plain: ranges of characters in which hidden tokens are not looked for, not even in part.
    """
    parts = [TextPart(0, len(text))] if text else []
    for special in specials:
        if (special.hidden and not parse_special) or special.text not in text:
            continue
        hidden_plain = plain if special.hidden else ()
        cut: list[TextPart] = []
        for part in parts:
            cut.extend(_cut(text, part, special, hidden_plain) if part.id is None else (part,))
        parts = cut
    return parts


def _cut(
    text: str, part: TextPart, special: Special, plain: Sequence[tuple[int, int]]
) -> Iterator[TextPart]:
    start, at = part.start, part.start - 1
    while (at := text.find(special.text, at + 1, part.end)) >= 0:
        end = at + len(special.text)
        if any(first < end and at < last for first, last in plain):
            continue
        left = at
        while special.lstrip and left > start and text[left - 1] in SPACES:
            left -= 1
        if left > start:
            yield TextPart(start, left)
        while special.rstrip and end < part.end and text[end] in SPACES:
            end += 1
        yield TextPart(at, at + len(special.text), special.id)
        start, at = end, end - 1
    if start < part.end:
        yield TextPart(start, part.end)
