"""SentencePiece's precompiled table of replacements: strings → strings, longest key first.

    u32         bytes of the trie
    u32[n]      the trie, a double array (Darts-clone's); a unit is
                  bits 0-7 and 31  its label, the byte that leads to it (bit 31: it holds a value)
                  bit 8            it has a value
                  bit 9, 10-30     its base: bits 10 on, times 256 if bit 9 is set
    bytes       the replacements, each ended by 0; a value is an offset into them

The children's origin of unit i is o = i ^ base: its child for byte c is unit o ^ c, its value is in
unit o. NFKC has 225,000 keys, almost all a letter with marks, so keys are looked up and never
listed.
"""

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from pyggml.errors import TokenizerError

_LABEL, _VALUE, _LEAF = 0x8000_00FF, 0x7FFF_FFFF, 1 << 8
_MOST_PAIRS = 1 << 18  # remembered pairs of characters
_MOST_BYTES = 1 << 10  # longest replacement, so that no text grows a million times; NFKC's have 33
_LONGEST = 64  # longest key in characters; those of real tables have at most 4


class Charsmap:
    """Replaces the keys of a table in texts.

    raw    the table
    keep   strings to leave alone: the longest prefix of one of them that a text has is not replaced

    Construction and `apply` raise TokenizerError for a damaged table.
    """

    def __init__(self, raw: bytes, keep: Iterable[str]) -> None:
        n_trie = int.from_bytes(raw[:4], "little")
        if len(raw) < 4 or n_trie % 4 or n_trie == 0 or 4 + n_trie >= len(raw):
            raise _damage_error(f"it has {len(raw)} bytes, of which {n_trie} are to be its trie")
        if raw[-1]:
            raise _damage_error("its last replacement has no end")
        self._units: list[int] = np.frombuffer(raw, "<u4", n_trie // 4, 4).tolist()
        self._texts = raw[4 + n_trie :]
        self._root = _base(self._units[0])
        self._keep = _trie(keep)
        self._origins: dict[str, int | None] = {}
        self._follows: dict[tuple[str, str], bool] = {}

    def apply(self, text: str) -> str:
        """The text with every longest key replaced, from left to right."""
        candidate = self._candidate(text)
        if candidate is None:
            return text
        parts, at = [], 0
        while match := candidate.search(text, at):
            parts.append(text[at : match.start()])
            replacement, at = self._replacement(text, match.start())
            parts.append(replacement)
        return "".join((*parts, text[at:]))

    def _candidate(self, text: str) -> re.Pattern[str] | None:
        """A pattern of the few positions where a key or a kept string may begin in this text.

        It is made from the pairs of adjacent characters in the text. All pairs of its characters
        would be hundreds of millions in a text of several scripts.
        """
        chars = set(text)
        one = {c for c in chars if c in self._keep or self._match(c, 0) is not None}
        firsts = {c for c in chars if self._origin(c) is not None}
        pairs = [p for p in set(pairwise(text)) if p[0] in firsts and self._may_follow(*p)]
        patterns = [_class(one)] if one else []
        if pairs:
            patterns.append(f"{_class(c for c, _ in pairs)}(?={_class(d for _, d in pairs)})")
        return re.compile("|".join(patterns)) if patterns else None

    def _replacement(self, text: str, at: int) -> tuple[str, int]:
        """The replacement of the characters from `at` on, and the end of those replaced."""
        node, end = self._keep, at
        while end < len(text) and text[end] in node:
            node, end = node[text[end]], end + 1
        if end > at:
            return text[at:end], end
        return self._match(text, at) or (text[at], at + 1)

    # -- the trie -------------------------------------------------------------------------------

    def _match(self, text: str, start: int) -> tuple[str, int] | None:
        """The replacement of the longest key at `start`, and the key's end; None without a key."""
        longest, origin = None, self._root
        for at in range(start, min(start + _LONGEST, len(text))):
            below, has_value = self._walk(origin, text[at])
            if below is None:
                break
            origin = below
            if has_value:
                longest = self._unit(origin) & _VALUE, at + 1
        return longest and (self._text(longest[0]), longest[1])

    def _walk(self, origin: int, char: str) -> tuple[int | None, bool]:
        """The children's origin after the bytes of a character, or None if no key goes on so;
        whether a key ends there."""
        has_value = False
        for byte in char.encode():
            node = origin ^ byte
            if not byte or node >= len(self._units) or self._units[node] & _LABEL != byte:
                return None, False
            unit = self._units[node]
            origin, has_value = node ^ _base(unit), unit & _LEAF != 0
        return origin, has_value

    def _origin(self, char: str) -> int | None:
        if char not in self._origins:
            self._origins[char] = self._walk(self._root, char)[0]
        return self._origins[char]

    def _may_follow(self, first: str, second: str) -> bool:
        may_follow = self._follows.get((first, second))
        if may_follow is None:
            if len(self._follows) > _MOST_PAIRS:  # bounds the memory
                self._follows.clear()
            origin = self._origin(first)
            may_follow = origin is not None and self._walk(origin, second)[0] is not None
            self._follows[first, second] = may_follow
        return may_follow

    def _unit(self, index: int) -> int:
        if index >= len(self._units):
            raise _damage_error(f"its trie of {len(self._units)} units points at unit {index}")
        return self._units[index]

    def _text(self, start: int) -> str:
        if start >= len(self._texts):
            raise _damage_error(f"a replacement begins at byte {start} of {len(self._texts)}")
        end = self._texts.find(b"\0", start, start + _MOST_BYTES)
        if end < 0:
            raise _damage_error(
                f"the replacement at byte {start} is longer than {_MOST_BYTES} bytes"
            )
        try:
            return self._texts[start:end].decode()
        except UnicodeDecodeError:
            raise _damage_error(f"the replacement at byte {start} is not UTF-8") from None


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


def _damage_error(why: str) -> TokenizerError:
    return TokenizerError(f"tokenizer.ggml.precompiled_charsmap is damaged: {why}")
