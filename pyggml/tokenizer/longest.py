"""The longest token at a position of a text, for WordPiece and RWKV."""

from collections.abc import Mapping
from typing import AnyStr, Generic


class Longest(Generic[AnyStr]):
    """Longest match in a mapping token → id; tokens are all str or all bytes, none empty.

    A table maps two units (characters or bytes) to the lengths of the tokens that begin with them.
    A slice of each length is looked up: fewer than ten at most positions, in real vocabularies.
    """

    def __init__(self, ids: Mapping[AnyStr, int]) -> None:
        lengths: dict[AnyStr, set[int]] = {}
        for token in ids:
            if len(token) > 1:
                lengths.setdefault(token[:2], set()).add(len(token))
        self._ids: Mapping[AnyStr, int] = ids
        self._lengths: dict[AnyStr, list[int]] = {
            head: sorted(each, reverse=True) for head, each in lengths.items()
        }

    def at(self, text: AnyStr, start: int) -> tuple[int, int] | None:
        """(id, length) of the longest token at `start`; None if there is none."""
        for length in self._lengths.get(text[start : start + 2], ()):
            piece = text[start : start + length]  # shorter at the end, and then the whole rest
            id = self._ids.get(piece)
            if id is not None:
                return id, len(piece)
        id = self._ids.get(text[start : start + 1])
        return None if id is None else (id, 1)
