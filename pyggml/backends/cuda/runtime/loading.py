"""Weights to a card, as fast as its bus goes.

A copy from memory that the driver has not locked goes through a small buffer of its own, at an
eighth of the bus. What is copied once goes through locked memory of ours: threads read the file,
each into one half of its memory while the other half is copied. A core reads 5 GB/s so, the bus of
a large card takes 55. To lock the pages of a file takes longer than to copy them. That is done for
weights that stream, which are copied in each run.
"""

import mmap
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np

from pyggml import threads
from pyggml.backends.cpu.pages import have_room_locked, map_of
from pyggml.backends.cuda.runtime.driver import CudaAPIError, direct, driver, make_current
from pyggml.backends.cuda.runtime.sending import READS_FILES, send
from pyggml.backends.cuda.runtime.simulator import on_card
from pyggml.backends.cuda.runtime.transfers import Bytes
from pyggml.errors import FileChangedError

_HALF = 2 << 20
_MOST_THREADS = 16
_TOGETHER = 4  # pieces that a thread takes at a time
_PORTABLE, _READ_ONLY = 1, 8  # CU_MEMHOSTREGISTER_…: for all cards; pages that may not be written
_OWN_STREAM = 2  # CU_STREAM_PER_THREAD
_HUGE = 2 << 20
_APART, _UNTIMED = 1, 2  # CU_STREAM_NON_BLOCKING, CU_EVENT_DISABLE_TIMING


def load(index: int, pairs: Iterable[tuple[Bytes, np.ndarray]]) -> None:
    """Copy arrays without gaps to a card's memory, and wait until they are there. The first are
    copied while the others' memory is taken. Raises FileChangedError if a file has become
    shorter."""
    queue, maps = SimpleQueue[np.ndarray | None](), dict[int, Any]()
    stream, n = _new_stream(), min(_MOST_THREADS, threads.most())
    try:
        with ThreadPoolExecutor(n) as pool:
            sent = [pool.submit(_send, index, stream, queue) for _ in range(n)]
            try:
                for target, values in pairs:
                    mapped = map_of(values)
                    maps[id(mapped)] = mapped
                    for rows in _pieces(target, values, mapped):
                        queue.put(rows)
            finally:
                for _ in sent:
                    queue.put(None)
    finally:
        _end_stream(stream)
    codes = [one.result() for one in sent]
    if min(codes) < 0:
        for mapped in maps.values():
            if hasattr(mapped, "check"):
                mapped.check()
        raise FileChangedError("a model's file could not be read to its end")
    if code := max(codes):
        raise CudaAPIError(code, f"a copy to the card results in {code}")


def _pieces(target: Bytes, values: np.ndarray, mapped: Any) -> Iterator[np.ndarray]:
    """An array in pieces, some at a time, as `send` takes them: from its file, if it has one."""
    handle, start = -1, values.ctypes.data
    if READS_FILES and hasattr(mapped, "handle"):
        handle, start = mapped.handle, start - np.frombuffer(mapped, np.uint8).ctypes.data
    for first in range(0, target.n, _TOGETHER * _HALF):
        at = np.arange(first, min(first + _TOGETHER * _HALF, target.n), _HALF)
        n = np.minimum(_HALF, target.n - at)
        yield np.stack([np.full_like(at, handle), start + at, target.address + at, n], axis=1)


def _send(index: int, stream: int, queue: SimpleQueue[np.ndarray | None]) -> int:
    """Copy pieces until there are no more; what `send` returned that is not 0, else 0."""
    make_current(index)
    rows, code, turn = queue.get(), 0, 0
    if rows is None:
        return 0
    memory, events = _lock_memory(2 * _HALF), _new_events()
    while rows is not None:
        code = code or send(rows, turn, memory, stream, events)
        turn += len(rows)
        rows = queue.get()
    _end_events(events)
    unlock_pages(memory.ctypes.data)
    return code


@on_card
def _lock_memory(n_bytes: int) -> np.ndarray:
    """Page-locked memory, until `unlock_pages`; from what the driver refuses to lock it copies more
    slowly. Each thread touches its own first, in huge pages if the system has them: what the driver
    takes by itself, page by page, takes twice as long."""
    whole = np.frombuffer(wide := mmap.mmap(-1, n_bytes + _HUGE), np.uint8)
    with suppress(AttributeError, OSError):  # not every system has them
        wide.madvise(mmap.MADV_HUGEPAGE)
    first = -whole.ctypes.data % _HUGE
    memory = whole[first : first + n_bytes]
    memory[:: mmap.PAGESIZE] = 0
    with suppress(CudaAPIError):
        direct.cuMemHostRegister(memory.ctypes.data, n_bytes, _PORTABLE)
    return memory


@on_card
def _new_stream() -> int:
    """The handle of a stream: on one for all threads copies follow each other the sooner."""
    return int(driver.cuStreamCreate(_APART))


@on_card
def _end_stream(stream: int) -> None:
    direct.cuStreamDestroy(stream)


@on_card
def _new_events() -> np.ndarray:
    """The handles of two events."""
    return np.array([int(driver.cuEventCreate(_UNTIMED)) for _ in range(2)])


@on_card
def _end_events(events: np.ndarray) -> None:
    """Wait for events, and destroy them."""
    for event in events.tolist():
        direct.cuEventSynchronize(event)
        direct.cuEventDestroy(event)


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
