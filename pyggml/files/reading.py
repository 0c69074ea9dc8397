"""Regular files, opened so that nothing blocks and nothing is without an end."""

import errno
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO

from pyggml.files.own import BINARY, NO_WAIT, kind_of


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """A file, to read its bytes. OSError, in words, for a folder, a pipe and a device; ValueError
    for a NUL in the path."""
    # Opening a pipe wakes who waits at its other end.
    _check(path, os.stat(path))  # noqa: PTH116  # Path("") is a folder, "" no name at all
    handle = os.open(path, os.O_RDONLY | NO_WAIT | BINARY)
    try:
        _check(path, os.fstat(handle))  # another file may stand there by now
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _check(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        fault = f"it is a {kind_of(status.st_mode)}, wanted a file"
        raise OSError(errno.EINVAL, fault, str(path))


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """All of a regular file. OSError as above, and for one of more than `most` bytes."""
    with open_regular(path) as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(Path(path)))
    return raw


def first_hole(file: BinaryIO) -> int | None:
    """The first byte of a file that nobody ever wrote and no disk holds, though the file goes on:
    such bytes are NULs, and there may be 2⁶⁰ of them. None if all were written, or nobody knows.
    """
    if not hasattr(os, "SEEK_HOLE"):
        return None
    handle = file.fileno()
    before = os.lseek(handle, 0, os.SEEK_CUR)  # where the file's buffer takes it to be
    try:
        at = os.lseek(handle, 0, os.SEEK_HOLE)
    except OSError:  # an empty file; a file system that does not tell
        return None
    finally:
        os.lseek(handle, before, os.SEEK_SET)
    return at if at < os.fstat(handle).st_size else None
