"""Writing files so that a crash, a full disk or Ctrl-C never leaves half of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pyggml.errors import PyggmlError


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path beside `path` to write to; on success it is fsynced and renamed over `path`.

    If the block raises, `path` is left as it was and the partial file is removed. An OSError
    (full disk, no such folder, no permission) becomes a PyggmlError that names `path`. A folder or
    a device is refused before anything is written.
    """
    target = Path(path)
    if not target.name or "\0" in str(target):
        raise PyggmlError(f"{str(target)!r}: cannot be written: this is no name of a file")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        if target.exists() and not target.is_file():  # a rename would put a file in its place
            found = "folder" if target.is_dir() else "device"
            raise PyggmlError(f"{target}: cannot be written: it is a {found}")
        yield partial
        with partial.open("r+b") as written:
            os.fsync(written.fileno())
        partial.replace(target)
        _sync_folder(target.parent)
    except OSError as error:
        raise PyggmlError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # most often it is gone; where it could not be made, too
            partial.unlink()


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut; Windows cannot open folders and need not."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
