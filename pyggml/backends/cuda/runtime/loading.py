"""Weights to a card, as fast as its bus goes.

A copy from memory that the driver has not locked goes through a small buffer of its own, at an
eighth of the bus. What is copied once goes through locked memory of ours: threads read the file,
each into one half of its memory while the other half is copied. A core reads 5 GB/s so, the bus of
a large card takes 55. To lock the pages of a file takes longer than to copy them. That is done for
weights that stream, which are copied in each run.
"""

import mmap
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np

from pyggml import threads
from pyggml.backends.cpu.pages import have_room_locked, map_of
from pyggml.backends.cuda.runtime.driver import CudaAPIError, cuda, direct, make_current
from pyggml.backends.cuda.runtime.sending import READS_FILES, send
from pyggml.backends.cuda.runtime.simulator import on_card
from pyggml.backends.cuda.runtime.transfers import Bytes
from pyggml.errors import FileChangedError

_HALF = 2 << 20
_MOST_THREADS = 16
_PORTABLE, _READ_ONLY = 1, 8  # CU_MEMHOSTREGISTER_…: for all cards; pages that may not be written
_OWN_STREAM = 2  # CU_STREAM_PER_THREAD


def load(index: int, pairs: Sequence[tuple[Bytes, np.ndarray]]) -> None:
    """Copy arrays without gaps to a card's memory, and wait until they are there. Raises
    FileChangedError if a file has become shorter."""
    pieces = [piece for pair in pairs for piece in _pieces(*pair)]
    n = max(1, min(_MOST_THREADS, threads.most(), len(pieces)))
    with ThreadPoolExecutor(n) as pool:
        codes = list(pool.map(partial(_send, index), (pieces[i::n] for i in range(n))))
    if min(codes) < 0:
        for _, values in pairs:
            if (check := getattr(map_of(values), "check", None)) is not None:
                check()
        raise FileChangedError("a model's file could not be read to its end")
    if code := max(codes):
        raise CudaAPIError(code, f"a copy to the card results in {code}")


def _pieces(target: Bytes, values: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
    """An array in pieces, as `send` takes them: from its file, if it has one."""
    mapped, handle, start = map_of(values), -1, values.ctypes.data
    if READS_FILES and mapped is not None and hasattr(mapped, "handle"):
        handle, start = mapped.handle, start - np.frombuffer(mapped, np.uint8).ctypes.data
    for at in range(0, target.n, _HALF):
        yield handle, start + at, target.address + at, min(_HALF, target.n - at)


def _send(index: int, pieces: Sequence[tuple[int, int, int, int]]) -> int:
    make_current(index)
    memory: Any = cuda.pinned_array(2 * _HALF, np.uint8)
    return send(np.array(pieces, np.int64).reshape(-1, 4), np.asarray(memory), _OWN_STREAM)


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
