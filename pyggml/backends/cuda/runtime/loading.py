"""Weights to a card, as fast as its bus goes: straight from the pages of their file.

A copy from memory that the driver has not locked goes through a small buffer of its own, at an
eighth of the bus. So a few threads each lock a chunk of the mapped file, have it copied, and unlock
it again, and the bus is never idle. What the driver does not lock is copied as it is.
"""

import mmap
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import NamedTuple
from weakref import WeakKeyDictionary, finalize

import numpy as np

from pyggml.backends.cpu.pages import have_room_locked, map_of
from pyggml.backends.cuda.runtime.driver import CudaAPIError, direct, make_current
from pyggml.backends.cuda.runtime.simulator import on_card
from pyggml.backends.cuda.runtime.transfers import Bytes

_CHUNK = 128 << 20
_AT_ONCE = 6  # chunks
_PORTABLE, _READ_ONLY = 1, 8  # CU_MEMHOSTREGISTER_…: for all cards; pages that may not be written
_OWN_STREAM = 2  # CU_STREAM_PER_THREAD


class _Stretch(NamedTuple):
    """Bytes of one array in one chunk: where they are, and where on the card they go."""

    array: np.ndarray
    source: int
    target: int
    n: int


def load(index: int, pairs: Iterable[tuple[Bytes, np.ndarray]]) -> None:
    """Copy arrays without gaps to a card's memory, and wait until they are there."""
    chunks = defaultdict[int, list[_Stretch]](list)
    for target, values in pairs:
        start = values.ctypes.data
        for at in range(start // _CHUNK, -(-(start + target.n) // _CHUNK)):
            first = max(start, at * _CHUNK)
            n = min(start + target.n, (at + 1) * _CHUNK) - first
            chunks[at].append(_Stretch(values, first, target.address + first - start, n))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(partial(_load_chunk, index), chunks.values()):
            pass


def _load_chunk(index: int, pieces: Sequence[_Stretch]) -> None:
    make_current(index)
    first = min(piece.source for piece in pieces) // mmap.PAGESIZE * mmap.PAGESIZE
    n = max(piece.source + piece.n for piece in pieces) - first
    for piece in pieces:
        _ask_for(piece)
    locked = lock_pages(first, n)
    try:
        _copy_all(pieces)
    finally:
        if locked:
            unlock_pages(first)


def _ask_for(piece: _Stretch) -> None:
    """Have the system read a file's bytes ahead, if it has not yet."""
    mapped = map_of(piece.array)
    if mapped is not None and hasattr(mmap, "MADV_WILLNEED"):
        start = piece.source - np.frombuffer(mapped, np.uint8).ctypes.data
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        with suppress(OSError):
            mapped.madvise(mmap.MADV_WILLNEED, page, start + piece.n - page)


_FILES: WeakKeyDictionary[mmap.mmap, bool] = WeakKeyDictionary()  # whether their pages are locked


def lock_file(values: np.ndarray) -> None:
    """Lock the pages of the file that an array lies in, as long as it is mapped. A warning says if
    the driver refuses it, or if they would take most of the memory that is free."""
    mapped = map_of(values)
    if mapped is None or mapped in _FILES:
        return
    start, n = np.frombuffer(mapped, np.uint8).ctypes.data, len(mapped)
    has_room = have_room_locked(n)
    _FILES[mapped] = is_locked = has_room and lock_pages(start, n)
    if is_locked:
        finalize(mapped, unlock_pages, start).atexit = False
    else:
        why = "the driver refuses that" if has_room else "there is too little free memory for it"
        warnings.warn(
            f"the {n:,} bytes of the model's file are not locked in memory, as {why}: weights "
            "stream at a fraction of the bus's speed",
            RuntimeWarning,
            stacklevel=2,
        )


def copy_rate(target: Bytes, values: np.ndarray) -> float:
    """Bytes a second of copies from locked pages: the second of two."""
    stretch = _Stretch(values, values.ctypes.data, target.address, target.n)
    start = stretch.source // mmap.PAGESIZE * mmap.PAGESIZE
    locked = lock_pages(start, stretch.source + target.n - start)
    _copy_all([stretch])
    began = perf_counter()
    _copy_all([stretch])
    taken = perf_counter() - began
    if locked:
        unlock_pages(start)
    return target.n / taken


@on_card
def lock_pages(start: int, n: int) -> bool:
    """Lock the pages of n bytes from the address of a page on, for reading, for all cards. Returns
    whether the driver does."""
    try:
        direct.cuMemHostRegister(
            start, -(-n // mmap.PAGESIZE) * mmap.PAGESIZE, _PORTABLE | _READ_ONLY
        )
    except CudaAPIError:
        return False
    return True


@on_card
def unlock_pages(start: int) -> None:
    """Let the pages go that were locked from this address on."""
    with suppress(CudaAPIError):  # at the end of a process the driver may be gone
        direct.cuMemHostUnregister(start)


@on_card
def _copy_all(pieces: Sequence[_Stretch]) -> None:
    for piece in pieces:
        direct.cuMemcpyHtoDAsync(piece.target, piece.source, piece.n, _OWN_STREAM)
    direct.cuStreamSynchronize(_OWN_STREAM)
