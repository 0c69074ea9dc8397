"""Weights to a card, as fast as its bus goes.

A copy from memory that the driver has not locked goes through a small buffer of its own, at an
eighth of the bus. What is copied once goes through locked memory of ours: some threads read the
file, each into one half of its piece while the other half is copied. To lock the pages of a file
takes longer than to copy them. That is done for weights that stream, which are copied in each run.
"""

import mmap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize

import numpy as np

from pyggml import threads
from pyggml.backends.cpu.pages import have_room_locked, map_of
from pyggml.backends.cuda.runtime.driver import CudaAPIError, cuda, direct, make_current
from pyggml.backends.cuda.runtime.simulator import on_card
from pyggml.backends.cuda.runtime.transfers import Bytes

_HALF = 4 << 20
_MOST_THREADS = 8
_PORTABLE, _READ_ONLY = 1, 8  # CU_MEMHOSTREGISTER_…: for all cards; pages that may not be written
_OWN_STREAM = 2  # CU_STREAM_PER_THREAD


class _Stretch(NamedTuple):
    """n bytes, from byte `start` of a file or of an array on; and where on the card they go."""

    read_into: Callable[[memoryview, int], None]
    start: int
    target: int
    n: int


def _stretches(target: Bytes, values: np.ndarray) -> Iterator[_Stretch]:
    """An array in pieces: from its file, if it has one."""
    mapped, first = map_of(values), 0
    read_into = getattr(mapped, "read_into", partial(_copy_into, values))
    if mapped is not None and hasattr(mapped, "read_into"):
        first = values.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    for at in range(0, target.n, _HALF):
        yield _Stretch(read_into, first + at, target.address + at, min(_HALF, target.n - at))


def _copy_into(values: np.ndarray, memory: memoryview, start: int) -> None:
    whole = values.reshape(-1).view(np.uint8)
    np.asarray(memory)[:] = whole[start : start + len(memory)]


def load(index: int, pairs: Iterable[tuple[Bytes, np.ndarray]]) -> None:
    """Copy arrays without gaps to a card's memory, and wait until they are there."""
    pieces = [piece for pair in pairs for piece in _stretches(*pair)]
    n = min(_MOST_THREADS, threads.most(), len(pieces))
    with ThreadPoolExecutor(max(n, 1)) as pool:
        for _ in pool.map(partial(_send, index), (pieces[i::n] for i in range(n))):
            pass  # which raises what a thread has raised


def _send(index: int, pieces: Sequence[_Stretch]) -> None:
    """Copy pieces. Little of it is Python's, which runs one thread at a time."""
    make_current(index)
    memory: Any = cuda.pinned_array(2 * _HALF, np.uint8)
    address, whole = memory.ctypes.data, memoryview(memory)
    for i, piece in enumerate(pieces):
        at = i % 2 * _HALF
        piece.read_into(whole[at : at + piece.n], piece.start)
        _wait()  # for the copy of the other half
        _copy(piece.target, address + at, piece.n)
    _wait()


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
    source = values.ctypes.data
    start = source // mmap.PAGESIZE * mmap.PAGESIZE
    locked, ends = lock_pages(start, source + target.n - start), list[float]()
    for _ in range(2):
        _copy(target.address, source, target.n)
        _wait()
        ends.append(perf_counter())
    if locked:
        unlock_pages(start)
    return target.n / (ends[1] - ends[0])


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
def _copy(target: int, source: int, n: int) -> None:
    """Begin to copy, on a stream of this thread."""
    direct.cuMemcpyHtoDAsync(target, source, n, _OWN_STREAM)


@on_card
def _wait() -> None:
    """Wait for this thread's copies."""
    direct.cuStreamSynchronize(_OWN_STREAM)
