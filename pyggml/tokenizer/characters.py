"""What llama.cpp's tables say of a character (unicode-data.cpp), from Python's."""

from __future__ import annotations

# str.isspace also holds for U+001C to U+001F, which are control characters there.
SPACES = frozenset(c for c in map(chr, range(0x3001)) if c.isspace()) - set("\x1c\x1d\x1e\x1f")


def lowered(char: str) -> str:
    """Its lower case of one character: "İ" becomes "i", without the dot that Python adds."""
    return char.lower()[0]
