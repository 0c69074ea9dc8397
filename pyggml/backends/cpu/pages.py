"""Pages of mapped files count as a process's memory once it has read them.

The system holds them anyway and takes them back when memory is short; letting go of them keeps the
process small. It costs about 0.1 ms a MB, mapping them again included.
"""

from __future__ import annotations

import mmap
import sys

import numpy as np

from pyggml.call import Call

LEAST = 1 << 16  # bytes; the system maps pages in runs of this size


def release(a: np.ndarray) -> Call | None:
    """The call that lets go of the pages of an array in a mapped file, which the next reader maps
    again; None if it lies elsewhere, is small, or the system has no such call."""
    mapped = _map_of(a)
    if mapped is None or a.nbytes < LEAST or not sys.platform.startswith("linux"):
        return None
    start = a.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    page = start // mmap.PAGESIZE * mmap.PAGESIZE
    return Call(mapped.madvise, mmap.MADV_DONTNEED, page, start + a.nbytes - page)


def _map_of(a: np.ndarray) -> mmap.mmap | None:
    """The read-only map that an array looks into: nothing is lost with its pages."""
    owner: object = a
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj if owner.readonly else None
    return owner if isinstance(owner, mmap.mmap) and not a.flags.writeable else None
