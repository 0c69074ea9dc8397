"""Offsets in one arena: best fit, which takes pieces as they come and grows at the end, and lowest
fit, which knows the lives of all."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

import numpy as np

from pyggml.sizes import round_up

ALIGNMENT = 64  # bytes: one cache line, one AVX-512 register


class Arena:
    """Hands out offsets and takes them back; `peak` is the size the arena must have.

    Free blocks are kept sorted by offset and merged with their neighbours. All numbers are bytes.

    room: the bytes that were given back last, up to so many, are not handed out yet
    """

    def __init__(self, room: int = 0) -> None:
        self.peak = 0
        self._room = room
        self._waiting: deque[tuple[int, int]] = deque()  # (start, size), and their sum
        self._n_waiting = 0
        self._starts: list[int] = []
        self._sizes: list[int] = []

    def take(self, n_bytes: int) -> int:
        """Offset of a block of n_bytes: the smallest hole that fits, else the end of the arena."""
        size = round_up(n_bytes, ALIGNMENT)
        fitting = [(s, i) for i, s in enumerate(self._sizes) if s >= size]
        if not fitting:
            return self._grow(size)
        _, i = min(fitting)
        start = self._starts[i]
        self._starts[i] += size
        self._sizes[i] -= size
        if self._sizes[i] == 0:
            del self._starts[i], self._sizes[i]
        return start

    def _grow(self, size: int) -> int:
        """A block at the end of the arena; a free block that touches the end becomes part of it."""
        start = self.peak
        if self._starts and self._starts[-1] + self._sizes[-1] == self.peak:
            start = self._starts.pop()
            self._sizes.pop()
        self.peak = start + size
        return start

    def give_back(self, start: int, n_bytes: int) -> None:
        """Take a block back. It is free once it and later ones have more than `room` bytes."""
        size = round_up(n_bytes, ALIGNMENT)
        if size == 0:
            return
        self._waiting.append((start, size))
        self._n_waiting += size
        while self._n_waiting > self._room:
            start, size = self._waiting.popleft()
            self._n_waiting -= size
            self._free(start, size)

    def _free(self, start: int, size: int) -> None:
        i = bisect_left(self._starts, start)
        self._starts.insert(i, start)
        self._sizes.insert(i, size)
        if i + 1 < len(self._starts) and start + size == self._starts[i + 1]:
            self._sizes[i] += self._sizes[i + 1]
            del self._starts[i + 1], self._sizes[i + 1]
        if i > 0 and self._starts[i - 1] + self._sizes[i - 1] == start:
            self._sizes[i - 1] += self._sizes[i]
            del self._starts[i], self._sizes[i]


def lowest(lives: Sequence[tuple[float, float, int]]) -> tuple[np.ndarray, int]:
    """(n,) offsets of pieces, and the end of all. The largest piece is placed first, each at the
    lowest address that no piece has which lives at the same time.

    lives: first and last moment of each piece, and its bytes
    """
    first, last = (np.array([life[i] for life in lives], float) for i in (0, 1))
    sizes = np.array([size for *_, size in lives], np.int64)
    starts, ends = np.zeros_like(sizes), np.zeros_like(sizes)
    is_placed = np.zeros(len(sizes), bool)
    for i in np.argsort(-sizes, kind="stable"):
        meets = np.flatnonzero(is_placed & (first < last[i]) & (first[i] < last))
        meets = meets[np.argsort(starts[meets], kind="stable")]
        free = np.concatenate([[0], np.maximum.accumulate(ends[meets])])
        fits = np.flatnonzero(starts[meets] - free[:-1] >= sizes[i])
        starts[i] = free[fits[0]] if fits.size else free[-1]
        ends[i] = starts[i] + sizes[i]
        is_placed[i] = True
    return starts, int(ends.max(initial=0))
