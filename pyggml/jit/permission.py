"""Linux's permission to use tile registers (AMX)."""

import ctypes
import platform
import sys
from functools import cache

# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA): asm/prctl.h, asm/fpu/types.h
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18


@cache
def tiles_granted() -> bool:
    """Ask for the tile registers, for all threads of this process, old and new.

    An instruction on tiles ends a process that has no permission. Linux refuses before 5.16, on
    CPUs without tiles, under seccomp, and where a thread's alternate signal stack is too small.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None)
    libc.syscall.restype = ctypes.c_long
    arguments = (ctypes.c_long(n) for n in (_ARCH_PRCTL, _REQUEST, _TILE_DATA))
    return bool(libc.syscall(*arguments) == 0)
