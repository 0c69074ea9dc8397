"""The system's lock on an open file or folder: flock; on Windows a locked byte.

It ends with its process in any case, and is seen from every container of the machine, where numbers
of processes mean nothing.
"""

import os
import sys

if sys.platform == "win32":
    import msvcrt

    def try_lock(handle: int, shared: bool = False) -> bool:
        """Whether this handle now has the lock, which another one may hold. OSError on a disk
        without locks. shared: with others that share it too."""
        os.lseek(handle, 1 << 20, os.SEEK_SET)  # far behind what others shall read
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        finally:
            os.lseek(handle, 0, os.SEEK_SET)
        return True
else:
    import fcntl

    def try_lock(handle: int, shared: bool = False) -> bool:
        """Whether this handle now has the lock, which another one may hold. OSError on a disk
        without locks. shared: with others that share it too."""
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
