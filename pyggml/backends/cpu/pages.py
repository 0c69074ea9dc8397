"""Release of mapped pages.

Pages of a mapped file count as a process's memory after their first read. The system caches them
anyway, and takes them back when memory is short. Releasing them keeps the process small. Releasing
pages of 4 KB and mapping them again costs 0.05 to 0.1 ms a MB, on any number of threads: they wait
for each other. Huge pages, for which pyggml.gguf asks, cost nearly nothing.
"""

import mmap
import sys

import numpy as np

from pyggml.granted import free_memory
from pyggml.graph.call import Call

ENOUGH = 2  # times the bytes of a file: with so many free, none of its pages need be released
MOST_LOCKED = 0.8  # of the free memory
LEAST = 1 << 16  # bytes; the system maps pages in runs of this size


def are_scarce(n_bytes: int) -> bool:
    """Whether this process may have too little more memory to keep the pages of so large a file."""
    return free_memory() < ENOUGH * n_bytes


def have_room_locked(n_bytes: int) -> bool:
    """Whether so many bytes of a file may be locked in memory: they leave a fifth of it free."""
    return n_bytes < MOST_LOCKED * free_memory()


def release(a: np.ndarray) -> Call | None:
    """A call that releases the pages of an array in a mapped file; the next read maps them again.

    None for an array elsewhere or a small one, and on systems without such a call.
    """
    mapped = map_of(a)
    if mapped is None or a.nbytes < LEAST or not sys.platform.startswith("linux"):
        return None
    start = a.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    page = start // mmap.PAGESIZE * mmap.PAGESIZE
    return Call(mapped.madvise, mmap.MADV_DONTNEED, page, start + a.nbytes - page)


def map_of(a: np.ndarray) -> mmap.mmap | None:
    """The read-only map under an array; its pages can be released without loss."""
    owner: object = a
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj if owner.readonly else None
    return owner if isinstance(owner, mmap.mmap) and not a.flags.writeable else None
