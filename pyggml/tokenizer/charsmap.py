"""SentencePiece's precompiled table of replacements: strings → strings, the longest first.

    u32         bytes of the trie
    u32[n]      the trie, a double array (Darts-clone's); a unit is
                  bits 0-7 and 31  the byte that leads to it (bit 31 set: it holds a value)
                  bit 8            a value hangs below it
                  bit 9, 10-30     its base: bits 10 on, times 256 if bit 9 is set
    bytes       the replacements, each ended by 0; a value is an offset into them

Where a node is unit i, its place is i ^ base: its child for byte c is unit place ^ c, its value
unit place. NFKC has 225,000 keys, almost all of them a letter and its marks, so they are looked up
where a text has them and never listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from pyggml.errors import TokenizerError

_LABEL, _VALUE, _LEAF = 0x8000_00FF, 0x7FFF_FFFF, 1 << 8
_MOST_PAIRS = 1 << 18  # of characters that are remembered
_MOST_BYTES = 1 << 10  # of a replacement, or a text could grow a million times; NFKC's have 33
_LONGEST = 64  # characters of a key that are looked at; those of real tables have at most 4


class Charsmap:
    """`keep`: strings of which any beginning that stands in a text stays as it is there.

    Both may raise TokenizerError for a table that does not hold together.
    """

    def __init__(self, raw: bytes, keep: Iterable[str]) -> None:
        n_trie = int.from_bytes(raw[:4], "little")
        if len(raw) < 4 or n_trie % 4 or n_trie == 0 or 4 + n_trie >= len(raw):
            raise _damaged(f"it has {len(raw)} bytes, of which {n_trie} are to be its trie")
        if raw[-1]:
            raise _damaged("its last replacement has no end")
        self._units: list[int] = np.frombuffer(raw, "<u4", n_trie // 4, 4).tolist()
        self._texts = raw[4 + n_trie :]
        self._root = _base(self._units[0])
        self._keep = _trie(keep)
        self._places: dict[str, int | None] = {}
        self._follows: dict[tuple[str, str], bool] = {}

    def apply(self, text: str) -> str:
        """The text with every longest key replaced, from left to right."""
        candidate = self._candidate(text)
        if candidate is None:
            return text
        parts, at = [], 0
        while found := candidate.search(text, at):
            parts.append(text[at : found.start()])
            replacement, at = self._replacement(text, found.start())
            parts.append(replacement)
        return "".join((*parts, text[at:]))

    def _candidate(self, text: str) -> re.Pattern[str] | None:
        """Where a key or a kept string may begin in this text: few places.

        Only pairs that stand in it are looked at: of all that its characters make there would be
        hundreds of millions in a text of several scripts.
        """
        chars = set(text)
        one = {c for c in chars if c in self._keep or self._match(c, 0) is not None}
        firsts = {c for c in chars if self._place(c) is not None}
        pairs = [p for p in set(pairwise(text)) if p[0] in firsts and self._may_follow(*p)]
        patterns = [_class(one)] if one else []
        if pairs:
            patterns.append(f"{_class(c for c, _ in pairs)}(?={_class(d for _, d in pairs)})")
        return re.compile("|".join(patterns)) if patterns else None

    def _replacement(self, text: str, at: int) -> tuple[str, int]:
        """What stands for the characters up to which place."""
        node, end = self._keep, at
        while end < len(text) and text[end] in node:
            node, end = node[text[end]], end + 1
        if end > at:
            return text[at:end], end
        return self._match(text, at) or (text[at], at + 1)

    # -- the trie -------------------------------------------------------------------------------

    def _match(self, text: str, start: int) -> tuple[str, int] | None:
        """The replacement of the longest key at this place, and where the key ends."""
        longest, place = None, self._root
        for at in range(start, min(start + _LONGEST, len(text))):
            below, has_value = self._walk(place, text[at])
            if below is None:
                break
            place = below
            if has_value:
                longest = self._unit(place) & _VALUE, at + 1
        return longest and (self._text(longest[0]), longest[1])

    def _walk(self, place: int, char: str) -> tuple[int | None, bool]:
        """The place after the bytes of a character, if there is one; whether a key ends there."""
        has_value = False
        for byte in char.encode():
            node = place ^ byte
            if not byte or node >= len(self._units) or self._units[node] & _LABEL != byte:
                return None, False
            unit = self._units[node]
            place, has_value = node ^ _base(unit), unit & _LEAF != 0
        return place, has_value

    def _place(self, char: str) -> int | None:
        if char not in self._places:
            self._places[char] = self._walk(self._root, char)[0]
        return self._places[char]

    def _may_follow(self, first: str, second: str) -> bool:
        found = self._follows.get((first, second))
        if found is None:
            if len(self._follows) > _MOST_PAIRS:  # texts without end must not fill the memory
                self._follows.clear()
            place = self._place(first)
            found = place is not None and self._walk(place, second)[0] is not None
            self._follows[first, second] = found
        return found

    def _unit(self, index: int) -> int:
        if index >= len(self._units):
            raise _damaged(f"its trie of {len(self._units)} units points at unit {index}")
        return self._units[index]

    def _text(self, start: int) -> str:
        if start >= len(self._texts):
            raise _damaged(f"a replacement begins at byte {start} of {len(self._texts)}")
        end = self._texts.find(b"\0", start, start + _MOST_BYTES)
        if end < 0:
            raise _damaged(f"the replacement at byte {start} is longer than {_MOST_BYTES} bytes")
        try:
            return self._texts[start:end].decode()
        except UnicodeDecodeError:
            raise _damaged(f"the replacement at byte {start} is not UTF-8") from None


def _base(unit: int) -> int:
    return (unit >> 10) << ((unit & (1 << 9)) >> 6)


def _trie(strings: Iterable[str]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for string in strings:
        node = root
        for char in string:
            node = node.setdefault(char, {})
    return root


def _class(chars: Iterable[str]) -> str:
    return "[" + "".join(re.escape(char) for char in sorted(set(chars))) + "]"


def _damaged(why: str) -> TokenizerError:
    return TokenizerError(f"tokenizer.ggml.precompiled_charsmap is damaged: {why}")
