"""The process's own memory: what is not needed any more goes back to the system."""

import ctypes
import gc
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

_LINUX = sys.platform.startswith("linux")


def give_back() -> None:
    """Free what only cycles hold, and return the heap's free pages to the system.

    glibc keeps most pages of what was freed in small parts, whichever thread freed them. On systems
    without its call only the cycles are freed. With a fine-tune's graphs it takes 0.1 s.
    """
    gc.collect()
    if _LINUX:
        with suppress(AttributeError, OSError):  # musl has none
            ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def without_collector() -> Iterator[None]:
    """A context, or a decorator, in which Python looks for no garbage in cycles: among the tensors
    of a graph, nearly all alive, it would look in vain, for a fifth of the time of a plan."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def clear(a: np.ndarray) -> None:
    """Set a contiguous array of the process's own memory to 0; Linux takes its whole pages back
    until they are written again."""
    numbers = a.reshape(-1).view(np.uint8)
    start = min(-numbers.ctypes.data % mmap.PAGESIZE, numbers.size)
    stop = start + (numbers.size - start) // mmap.PAGESIZE * mmap.PAGESIZE
    address, n = ctypes.c_void_p(numbers.ctypes.data + start), ctypes.c_size_t(stop - start)
    is_back = _LINUX and not ctypes.CDLL(None).madvise(address, n, mmap.MADV_DONTNEED)
    numbers[: start if is_back else stop] = 0
    numbers[stop:] = 0
