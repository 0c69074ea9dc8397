"""Properties of characters as in llama.cpp's tables (unicode-data.cpp), from Python's tables."""

# str.isspace is also true of U+001C to U+001F, control characters in llama.cpp.
SPACES = frozenset(c for c in map(chr, range(0x3001)) if c.isspace()) - set("\x1c\x1d\x1e\x1f")


def lower_case(char: str) -> str:
    """The first character of its lower case: "İ" becomes "i", without Python's combining dot."""
    return char.lower()[0]
