"""Copies between the host and the card, in the order of a stream.

What the card sends arrives in page-locked memory, into which it writes while the host goes on.
Readers get that memory itself; when nobody has an array of it any more, it is used again.
"""

import ctypes
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import finalize

import numpy as np

from pyggml.backends.cuda.runtime.driver import (
    address,
    copy_between,
    cuda,
    direct,
    free_what_is_gone,
)
from pyggml.backends.cuda.runtime.events import Event
from pyggml.backends.cuda.runtime.simulator import on_card

_LEAST = 4 << 10
_MOST_LOCKED = 64 << 20  # bytes; what else is read meanwhile comes through ordinary memory


class Bytes:
    """Bytes on the card, and their address: asking Numba for it takes as long as a copy."""

    __slots__ = ("address", "array", "n")

    def __init__(self, array: Any) -> None:
        """array: uint8, one axis"""
        self.array, self.n, self.address = array, int(array.size), address(array)


_LOCKED: list[range] = []  # addresses of all pieces, of all cards


def is_locked(values: np.ndarray) -> bool:
    """Whether an array lies in a piece, as one that was read from a card may."""
    start = values.ctypes.data
    return any(start in piece for piece in tuple(_LOCKED))  # another thread may give one back


class _Piece:
    """Page-locked memory, and an event: what was last copied there has arrived."""

    def __init__(self, n: int) -> None:
        self.memory = cuda.pinned_array(n, np.uint8)
        first = self.memory.ctypes.data
        self.place = range(first, first + n)
        _LOCKED.append(self.place)
        finalize(self, _LOCKED.remove, self.place).atexit = False
        self.arrived = Event()


@dataclass(frozen=True, slots=True)
class End:
    """One of two cards: its number, its stream, what makes it current, and bytes of its memory."""

    index: int
    stream: Any
    working: Callable[[], AbstractContextManager[None]]
    bytes: Bytes


class Crossing:
    """A copy from one card to another among what both do: it begins when the giver has come to the
    mark and the taker to the copy. The giver goes on at once, until it is told of the copy."""

    def __init__(self, taker: End, giver: End) -> None:
        self._taker, self._giver = taker, giver
        with giver.working():
            self._made = Event()
        with taker.working():
            self._taken = Event()

    def mark(self) -> None:
        with self._giver.working():
            self._made.record(self._giver.stream)

    def take(self) -> None:
        taker, giver = self._taker, self._giver
        of, to = giver.bytes, taker.bytes
        with taker.working():
            self._made.hold(taker.stream)
            copy_between(taker.index, to.address, giver.index, of.address, to.n, taker.stream)
            self._taken.record(taker.stream)
        with giver.working():
            self._taken.hold(giver.stream)


class Transfers:
    """The copies of one card, made one after the other among the launches of a stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._free: dict[int, list[_Piece]] = defaultdict(list)  # by size
        self._n_locked = 0

    def to_card(self, target: Bytes, values: np.ndarray) -> None:
        """Copy an array without gaps. It may change as soon as this returns: the driver reads
        memory that is not page-locked at once."""
        if is_locked(values):
            values = values.copy()
        self.bind_to_card(target, values)()  # which does not hold the array

    def bind_to_card(self, target: Bytes, values: np.ndarray) -> Callable[[], object]:
        """A function that copies an array as it is when the function is called. The array must live
        until then and have no gaps; if it is page-locked, until the stream has come to the copy."""
        assert values.nbytes == target.n, f"{values.nbytes} bytes for {target.n}"
        if not target.n:
            return lambda: None
        return _sender(target, values, self._stream)

    def bind_to_host(self, memory: np.ndarray, source: Bytes) -> Callable[[], object]:
        """A function that begins to copy to page-locked memory of as many bytes, which must live
        until then."""
        return partial(_receive, memory.ctypes.data, source, self._stream)

    def to_host(self, source: Bytes) -> tuple[np.ndarray, Event]:
        """Begin to copy: (uint8 memory, the event after which it holds the bytes)."""
        piece = self._piece(max(_LEAST, source.n))
        memory = np.empty(source.n, np.uint8) if piece is None else self._lent(piece)
        arrived = Event() if piece is None else piece.arrived
        copy = memory[: source.n]
        if source.n:
            _receive(
                memory.ctypes.data if piece is None else piece.place.start, source, self._stream
            )
        arrived.record(self._stream)
        return copy, arrived

    def _piece(self, n: int) -> _Piece | None:
        """A piece of n bytes or more that nobody uses; for a new one, free pieces of other sizes
        are given back. None if so much memory is in use that no more may be locked."""
        size = 1 << (n - 1).bit_length()
        if self._free[size]:
            return self._free[size].pop()
        if size > _MOST_LOCKED:
            return None
        before = self._n_locked
        for other, pieces in self._free.items():
            while pieces and self._n_locked + size > _MOST_LOCKED:
                pieces.pop().arrived.wait()  # then it goes, and its memory with it
                self._n_locked -= other
        if self._n_locked < before:
            free_what_is_gone()
        if self._n_locked + size > _MOST_LOCKED:
            return None
        piece = _Piece(size)
        self._n_locked += size
        return piece

    def _lent(self, piece: _Piece) -> np.ndarray:
        """The memory of a piece, which is free again when the array and its views are gone."""
        size = piece.memory.size
        lease = (ctypes.c_uint8 * size).from_buffer(piece.memory)
        finalize(lease, self._free[size].append, piece).atexit = False
        return np.frombuffer(lease, np.uint8)


@on_card
def _sender(target: Bytes, values: np.ndarray, stream: Any) -> Callable[[], object]:
    start = values.ctypes.data
    return partial(direct.cuMemcpyHtoDAsync, target.address, start, target.n, stream.handle)


@on_card
def _receive(start: int, source: Bytes, stream: Any) -> None:
    direct.cuMemcpyDtoHAsync(start, source.address, source.n, stream.handle)
