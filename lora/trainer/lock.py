"""One writer at a time: a lock file that names the process holding it.

The lock is the system's, on the open file (flock; on Windows a locked byte). It ends with its
process in any case, so a file left behind by a killed process is taken over.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from pyggml.errors import PyggmlError

if sys.platform == "win32":
    import msvcrt

    _HELD = PermissionError

    def _lock(handle: int) -> None:
        os.lseek(handle, 1 << 20, os.SEEK_SET)  # far behind the number, which others shall read
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        os.lseek(handle, 0, os.SEEK_SET)
else:
    import fcntl

    _HELD = BlockingIOError

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def hold(target: Path) -> Iterator[None]:
    """Inside, no other process holds this file or folder; the lock file is gone at the end.

    Raises PyggmlError, naming the other process, if one holds it already.
    """
    path = _lock_file(target)
    handle = _take(path, target)
    try:
        os.truncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())
        yield
    finally:
        _remove(path, handle)


def holder(target: Path) -> int | None:
    """The process that holds this file or folder, as its lock file tells; None if none does.

    Nothing is locked meanwhile. The lock file of a killed process stays, but names none that lives.
    """
    try:
        number = int(_lock_file(target).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return number if 0 < number < 1 << 31 and psutil.pid_exists(number) else None


def _lock_file(target: Path) -> Path:
    return target / ".lock" if target.is_dir() else target.with_name(f".{target.name}.lock")


def _take(path: Path, target: Path) -> int:
    """A handle of the lock file, locked."""
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise PyggmlError(f"{path}: cannot be made: {error.strerror or error}") from error
        try:
            _lock(handle)
        except _HELD:
            os.close(handle)
            raise PyggmlError(
                f"{target}: is in use by process {_holder(path)}: wait for its end, or name "
                "another place to write to"
            ) from None
        except OSError:  # a file system without locks
            return handle
        if _is_still_there(path, handle):
            return handle
        os.close(handle)  # whoever held it removed it in between


def _is_still_there(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except OSError:
        return False


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip() or "of unknown number"
    except (OSError, ValueError):
        return "of unknown number"


def _remove(path: Path, handle: int) -> None:
    if sys.platform == "win32":  # which removes no open file
        os.close(handle)
    with suppress(OSError):
        path.unlink()
    if sys.platform != "win32":
        os.close(handle)
