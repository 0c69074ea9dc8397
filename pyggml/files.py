"""Atomic writing of files and folders: a crash, a full disk or Ctrl-C leaves no partial one.

What a killed process left, the next one that writes to the same folder removes. And the folder
where caches lie.
"""

import os
import re
import shutil
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from time import monotonic, sleep

from pyggml.errors import PyggmlError

# Another machine may write to the same folder, and its processes are not seen from here.
_MACHINE = os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")
_HERE = f"{zlib.crc32(_MACHINE.encode()):08x}"
_PATIENCE, _PAUSE = 5.0, 0.1  # seconds
_PARTIAL = re.compile(rf"\..+\.(\d+)-{_HERE}\.partial", re.DOTALL)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is fsynced and renamed to `path`.

    On an error, `path` is unchanged and the temporary file is removed; but if it was whole and
    could not be renamed, it is kept under a name that the error says. An OSError (full disk, no
    such folder, no permission) becomes a PyggmlError that names `path`. Folders and devices are
    refused at once.
    """
    target = Path(path)
    if not target.name or "\0" in str(target):
        raise PyggmlError(f"{str(target)!r}: cannot be written: this is no name of a file")
    partial = _partial(target)
    try:
        if target.exists() and not target.is_file():  # a rename would replace it by a file
            kind = "folder" if target.is_dir() else "device"
            raise PyggmlError(f"{target}: cannot be written: it is a {kind}")
        yield partial
        with partial.open("r+b") as written:
            os.fsync(written.fileno())
        _put(partial, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise PyggmlError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # after success, or if it was never created, there is none
            partial.unlink()


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success its files and their names are fsynced, and
    it is `path`.

    On an error it is removed, or kept as a file is. PyggmlError if `path` is anything but an empty
    folder, and for an OSError.
    """
    target = Path(path).absolute()
    partial = _partial(target)
    try:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise PyggmlError(f"{path}: is there already, wanted a new folder or an empty one")
        partial.mkdir()
        yield partial
        for inside in (partial, *partial.rglob("*")):
            if inside.is_dir():
                _sync_folder(inside)
                continue
            with inside.open("r+b") as written:
                os.fsync(written.fileno())
        if target.exists():
            target.rmdir()
        _put(partial, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise PyggmlError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put(partial: Path, target: Path) -> None:
    """Rename what is whole to its target. Windows refuses while another program has that open, a
    server or a virus scanner: it is tried again for some seconds, and what was written is kept."""
    until = monotonic() + _PATIENCE
    while True:
        try:
            partial.replace(target)
            return
        except PermissionError as error:
            if monotonic() < until:
                sleep(_PAUSE)
                continue
            kept = target.with_name(f"{target.name}.{os.getpid()}.new")
            partial.replace(kept)
            raise PyggmlError(
                f"{target}: cannot be replaced: {error.strerror or error}; another program may "
                f"have it open. What was to stand there is kept in {kept}"
            ) from error


def _partial(target: Path) -> Path:
    """Where this process writes what becomes `target`."""
    _remove_left(target.parent.absolute())
    return target.with_name(f".{target.name}.{os.getpid()}-{_HERE}.partial")


@cache
def _remove_left(folder: Path) -> None:
    """Remove what processes of this machine that are gone have left in a folder."""
    with suppress(OSError):
        for path in folder.iterdir():
            match = _PARTIAL.fullmatch(path.name)
            if match and not _is_running(int(match[1])):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_running(pid: int) -> bool:
    import psutil  # takes 10 ms, and is needed after a crash only

    return pid < 1 << 31 and psutil.pid_exists(pid)


def user_cache() -> Path:
    """The folder where the operating system keeps caches of this user, ours in it.

    RuntimeError for a user without a home.
    """
    if sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local")
    elif sys.platform == "darwin":
        root = Path.home() / "Library/Caches"
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "pyggml"


def _sync_folder(folder: Path) -> None:
    """Make names in a folder survive a power cut. Windows opens none, and needs no help."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
