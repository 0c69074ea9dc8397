"""Memory of a card in pieces: the driver gives whole pages of 2 MiB, which for a matrix of 4 MB
would be half as much again."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from pyggml.sizes import round_up

PAGE = 2 << 20  # what the driver gives; smaller pieces share one
_SLAB = 32 << 20
_LARGEST = _SLAB // 2  # of the pieces that are cut from slabs
_ALIGNMENT = 256
_MOST_OPEN = 4  # slabs with room; a piece is cut from the fullest that has enough


class Slabs:
    """Cuts small arrays from larger ones. A slab is free when all its pieces are gone, and pieces
    have filled later ones."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        """make: an array of so many bytes"""
        self._make = make
        self._open: list[tuple[int, Any]] = []  # bytes left at the end, and the slab

    def take(self, n_bytes: int) -> Any:
        """An array of n_bytes, aligned to 256."""
        if n_bytes > _LARGEST:
            return self._make(n_bytes)
        size = round_up(max(n_bytes, 1), _ALIGNMENT)
        left, slab = next((s for s in self._open if s[0] >= size), (0, None))
        if slab is None:
            left, slab = _SLAB, self._make(_SLAB)
        else:
            self._open = [s for s in self._open if s[1] is not slab]
        self._open = sorted([*self._open, (left - size, slab)], key=lambda s: s[0])[-_MOST_OPEN:]
        start = _SLAB - left
        return slab[start : start + max(n_bytes, 1)]


def taken(n_bytes: int) -> int:
    """Bytes of the card's memory that a piece takes, but for what is left of the last slabs."""
    return round_up(n_bytes, PAGE if n_bytes > _LARGEST else _ALIGNMENT)


class CommonMemory:
    """An array that is taken when the first of those who share it asks."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes, self.array = n_bytes, None

    def take(self, make: Callable[[int], Any]) -> Any:
        if self.array is None:
            self.array = make(self.n_bytes)
        return self.array


class MemoryPlace(NamedTuple):
    """Where n_bytes begin in a piece that others share."""

    piece: CommonMemory
    at: int
    n_bytes: int

    @property
    def share(self) -> int:
        """Bytes that count for it: those of the piece for the first."""
        return 0 if self.at else self.piece.n_bytes

    def memory(self, make: Callable[[int], Any]) -> Any:
        """make: an array of so many bytes"""
        return self.piece.take(make)[self.at : self.at + self.n_bytes]


def places(sizes: Sequence[int], beside: int = 0) -> list[MemoryPlace]:
    """Of arrays of so many bytes that lie side by side, and bytes beside them all."""
    piece, ends = CommonMemory(sum(sizes) + beside), accumulate(sizes)
    return [MemoryPlace(piece, end - n, n) for n, end in zip(sizes, ends, strict=True)]


def is_whole(parts: Sequence[MemoryPlace], beside: int) -> bool:
    """Whether these, in their order, and so much beside them are a piece."""
    (first, *_), ends = parts, [p.at + p.n_bytes for p in parts]
    in_line = [p.at for p in parts] == [0, *ends[:-1]] and len({p.piece for p in parts}) == 1
    return in_line and ends[-1] + beside == first.piece.n_bytes
