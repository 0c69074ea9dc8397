"""The longest token at a place of a text: what WordPiece and RWKV's tokenizer ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import AnyStr, Generic


class Longest(Generic[AnyStr]):
    """Over tokens → ids; all str or all bytes, none empty.

    A table from the first two units of a token to the lengths of those that begin so; the rest are
    look-ups of slices, fewer than ten at most places of real vocabularies.
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
        """(id, length) of the longest token that stands at `start`; None if no token does."""
        for length in self._lengths.get(text[start : start + 2], ()):
            piece = text[start : start + length]  # shorter at the end, and then the whole rest
            id = self._ids.get(piece)
            if id is not None:
                return id, len(piece)
        id = self._ids.get(text[start : start + 1])
        return None if id is None else (id, 1)
