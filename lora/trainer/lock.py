"""One writer at a time: a lock file that names the process holding it.

The lock is the system's, on the open file. It ends with its process in any case, so a file left
behind by a killed process is taken over. A lock file holds a number or nothing, and has one name:
what else stands there is a stranger's, whose bytes stay.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep

from pyggml.errors import PyggmlError, cause_of
from pyggml.files import behind_links
from pyggml.files.locks import try_lock
from pyggml.files.own import BINARY, NO_LINK, NO_WAIT, has_one_name

_LONGEST = 20  # digits of a process's number
_TRIES, _PAUSE = 5, 0.05  # of a lock that `is_held` may have for a moment; seconds


@contextmanager
def hold(target: Path) -> Iterator[None]:
    """Inside, no other process holds this file or folder; the lock file is gone at the end.

    Raises PyggmlError, naming the other process, if one holds it already, and for what is no lock
    file.
    """
    path = _lock_file(target)
    handle = _take(path, target)
    try:
        os.truncate(handle, 0)
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, str(os.getpid()).encode())
        yield
    finally:
        _remove(path, handle)


def is_held(target: Path) -> bool:
    """Whether a process holds this file or folder, be it of another container."""
    path = _lock_file(target)
    try:
        handle = os.open(path, os.O_RDONLY | NO_LINK | NO_WAIT | BINARY)
    except OSError:
        return False
    try:
        return not try_lock(handle, shared=True)
    except OSError:  # a disk without locks
        return False
    finally:
        os.close(handle)


def _lock_file(target: Path) -> Path:
    with suppress(OSError):  # which the opening tells
        target = behind_links(target)
    return target / ".lock" if target.is_dir() else target.with_name(f".{target.name}.lock")


def _take(path: Path, target: Path) -> int:
    """A handle of the lock file, locked."""
    tries = _TRIES
    while True:
        handle = _open(path)
        try:
            is_ours = try_lock(handle)
        except OSError:  # a file system without locks
            return handle
        if is_ours and _is_still_there(path, handle):
            return handle
        number = _number(handle)
        os.close(handle)
        if not is_ours:  # else whoever held it removed it in between
            tries -= 1
            if not tries:
                raise PyggmlError(
                    f"{target}: is in use by process {number}: wait for its end, or name another "
                    "place to write to"
                )
            sleep(_PAUSE)


def _open(path: Path) -> int:
    """A handle of the lock file, which is made if there is none. PyggmlError for a link, and for
    what holds more than a number, or has other names."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK | NO_WAIT | BINARY, 0o666)
    except OSError as error:
        reason = "it is a link" if path.is_symlink() else cause_of(error)
        raise PyggmlError(f"{path}: cannot be made: {reason}") from error
    status = os.fstat(handle)
    is_ours = has_one_name(status) or not status.st_nlink  # who held it has just removed it
    content = os.read(handle, _LONGEST + 1) if is_ours else b"none"
    if content and not content.isdigit():
        os.close(handle)
        raise PyggmlError(
            f"{path}: was not made by pyggml, and a lock would replace it: give the output another "
            "name, or that file"
        )
    return handle


def _is_still_there(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(handle))
    except OSError:
        return False


def _number(handle: int) -> str:
    """The number of the process that holds a lock file, if it has written it yet."""
    os.lseek(handle, 0, os.SEEK_SET)
    content = os.read(handle, _LONGEST + 1)
    return content.decode() if content.isdigit() else "of unknown number"


def _remove(path: Path, handle: int) -> None:
    is_ours = _is_still_there(path, handle)
    if sys.platform == "win32":  # which removes no open file
        os.close(handle)
    if is_ours:
        with suppress(OSError):
            path.unlink()
    if sys.platform != "win32":
        os.close(handle)
