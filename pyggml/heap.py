"""The process's heap: what was freed goes back to the system."""

import ctypes
import gc
import sys
from contextlib import suppress


def give_back() -> None:
    """Free what only cycles hold, and return the heap's free pages to the system.

    glibc keeps most pages of what was freed in small parts, whichever thread freed them. On systems
    without its call only the cycles are freed. With a fine-tune's graphs it takes 0.1 s.
    """
    gc.collect()
    if sys.platform.startswith("linux"):
        with suppress(AttributeError, OSError):  # musl has none
            ctypes.CDLL(None).malloc_trim(0)
