"""Weights to a card, as fast as its bus goes.

A copy from memory that the driver has not locked goes through a small buffer of its own, at an
eighth of the bus. What is copied once goes through locked memory of ours: threads read the file,
each into one half of its memory while the other half is copied. A core reads 5 GB/s so, the bus of
a large card takes 55. To lock the pages of a file takes longer than to copy them. That is done for
weights that stream, which are copied in each run; and for the first of a file, by a thread that
begins when it is opened.
"""

import mmap
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Thread
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np

from pyggml import threads
from pyggml.backends.cpu.pages import have_room_locked, map_of
from pyggml.backends.cuda.runtime.driver import CudaAPIError, direct, driver, make_current
from pyggml.backends.cuda.runtime.sending import READS_FILES, loop, send
from pyggml.backends.cuda.runtime.simulator import on_card
from pyggml.backends.cuda.runtime.transfers import Bytes
from pyggml.errors import FileChangedError

_HALF = 2 << 20
_MOST_THREADS = 16
_MOST_AHEAD, _LOCKED = 4 << 30, 128 << 20  # bytes of files that are locked early; at once
_PORTABLE, _READ_ONLY = 1, 8  # CU_MEMHOSTREGISTER_…: for all cards; pages that may not be written
_OWN_STREAM = 2  # CU_STREAM_PER_THREAD
_HUGE = 2 << 20
_APART, _UNTIMED = 1, 2  # CU_STREAM_NON_BLOCKING, CU_EVENT_DISABLE_TIMING


def load(index: int, pairs: Iterable[tuple[int, np.ndarray]]) -> None:
    """Copy arrays without gaps to addresses of a card's memory, and wait until they are there.
    Raises FileChangedError if a file has become shorter."""
    maps, wholes = dict[int, tuple[Any, int, int, FirstBytes | None]](), []
    for target, values in pairs:
        mapped = map_of(values)
        if id(mapped) not in maps:
            maps[id(mapped)] = mapped, *_file_of(mapped)
        _, handle, start, first_bytes = maps[id(mapped)]
        at, n = values.ctypes.data - start, values.nbytes
        done = first_bytes.copy(target, at, n) if first_bytes else 0
        wholes.append((handle, at + done, target + done, n - done))
    codes = _send_all(index, _pieces(np.array(wholes, np.int64).reshape(-1, 4)))
    _wait()
    for mapped, _, _, first_bytes in maps.values():
        if first_bytes:
            first_bytes.free()
        if hasattr(mapped, "check"):
            mapped.check()
    if min(codes, default=0) < 0:
        raise FileChangedError("a model's file could not be read to its end")
    if code := max(codes, default=0):
        raise CudaAPIError(code, f"a copy to the card results in {code}")


def _file_of(mapped: Any) -> "tuple[int, int, FirstBytes | None]":
    """(handle, address of the first byte, bytes that are locked) of a mapped file; (-1, 0, None) of
    memory."""
    if not _is_file(mapped):
        return -1, 0, None
    first_bytes = _AHEAD.pop(mapped, None)
    if first_bytes:
        first_bytes.stop()
    return mapped.handle, np.frombuffer(mapped, np.uint8).ctypes.data, first_bytes


def _is_file(mapped: Any) -> bool:
    return READS_FILES and hasattr(mapped, "handle")


def _pieces(wholes: np.ndarray) -> np.ndarray:
    """Rows of `send` cut into such as fit into half of a thread's memory."""
    counts = -(-wholes[:, 3] // _HALF)
    rows, ends = np.repeat(wholes, counts, axis=0), np.cumsum(counts)
    at = (np.arange(len(rows)) - np.repeat(ends - counts, counts)) * _HALF
    rows[:, 1:3] += at[:, None]
    rows[:, 3] = np.minimum(_HALF, rows[:, 3] - at)
    return rows


def _send_all(index: int, rows: np.ndarray) -> list[int]:
    """Copy rows by threads, of which each returns what `send` does."""
    if not len(rows):
        return []
    n, stream, shared = (
        min(_MOST_THREADS, threads.most(), len(rows)),
        _new_stream(),
        np.zeros(1, int),
    )
    memories = list[np.ndarray]()
    loop()  # before threads want it at once
    try:
        with ThreadPoolExecutor(n) as pool:
            sent = [pool.submit(_send, index, stream, rows, shared, memories) for _ in range(n)]
    finally:
        _end_stream(stream)
        Thread(target=_unlock, args=(index, memories)).start()
    return [one.result() for one in sent]


def _send(
    index: int, stream: int, rows: np.ndarray, shared: np.ndarray, memories: list[np.ndarray]
) -> int:
    """What `send` returns to a thread that copies rows until there are no more."""
    make_current(index)
    memory, events = _lock_memory(2 * _HALF), _new_events()
    memories.append(memory)
    code = send(rows, shared, memory, stream, events)
    _end_events(events)
    return code


def _unlock(index: int, memories: Iterable[np.ndarray]) -> None:
    make_current(index)
    for memory in memories:
        unlock_pages(memory.ctypes.data)


class FirstBytes:
    """The first bytes of a file, which a thread locks in memory until it is told to stop, in a map
    of their own: the pages of the model's would take long to release."""

    def __init__(self, index: int, mapped: Any, most: int) -> None:
        self._index, self._map = index, mmap.mmap(mapped.handle, most, access=mmap.ACCESS_READ)
        self._start = np.frombuffer(self._map, np.uint8).ctypes.data
        self._n, self._goes_on = 0, True
        self._thread = Thread(target=self._lock, args=(most,), daemon=True)
        self._thread.start()

    def _lock(self, most: int) -> None:
        make_current(self._index)
        while self._goes_on and self._n < most:
            n = min(_LOCKED, most - self._n)
            if not lock_pages(self._start + self._n, n):
                return
            self._n += n

    def stop(self) -> None:
        """Lock no more. It waits for what is being locked."""
        self._goes_on = False
        self._thread.join()

    def copy(self, target: int, first: int, n: int) -> int:
        """Begin to copy bytes of the file to an address on the card, as many as are locked; how
        many these are. No copy crosses what was locked at once."""
        at, end = first, min(first + n, self._n)
        while at < end:
            until = min(end, (at // _LOCKED + 1) * _LOCKED)
            _copy(target + at - first, self._start + at, until - at)
            at = until
        return max(end - first, 0)

    def free(self) -> None:
        """Let the pages go, on a thread."""
        if not self._map.closed:
            Thread(target=self._free).start()

    def _free(self) -> None:
        self.stop()
        make_current(self._index)
        for first in range(0, self._n, _LOCKED):
            unlock_pages(self._start + first)
        self._n = 0
        self._map.close()


_AHEAD: WeakKeyDictionary[mmap.mmap, FirstBytes] = WeakKeyDictionary()


def expect(index: int, arrays: Iterable[np.ndarray]) -> None:
    """Begin to lock the first bytes of the files in which arrays lie, as far as memory has room:
    `load` copies these at once, and has begun with the others when they are there."""
    maps, left = {id(m): m for m in map(map_of, arrays) if m is not None}, _MOST_AHEAD
    for mapped in filter(_is_file, maps.values()):
        n = min(len(mapped), left)
        if n and mapped not in _AHEAD and have_room_locked(n):
            left -= n
            _AHEAD[mapped] = first_bytes = FirstBytes(index, mapped, n)
            finalize(mapped, first_bytes.free).atexit = False
            finalize(mapped, first_bytes.stop)  # at the end of the process too


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
    if first_bytes := _AHEAD.pop(mapped, None):
        first_bytes.free()
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
