"""Atomic writing of files and folders: a crash, a full disk or Ctrl-C leaves no partial one.

What is written has a name of its own beside its target, made with O_EXCL, so that no link leads it
elsewhere, and is locked while its writer lives. What a killed process left, the next one that
writes to the same folder removes: if the name is ours, is of this very file (it has its inode) and
nobody holds its lock.
"""

import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import monotonic, sleep
from typing import BinaryIO

from pyggml.errors import PyggmlError
from pyggml.files.locks import try_lock
from pyggml.files.own import BINARY, NO_LINK, NO_WAIT, behind_links, has_one_name, kind_of

# Another machine may write to the same folder, and its locks need not be seen from here.
_MACHINE = os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")
_HERE = f"{zlib.crc32(_MACHINE.encode()):08x}"
_PATIENCE, _PAUSE = 5.0, 0.1  # seconds
_LONGEST = 40  # characters of a target's name that its partial file has, too
_PARTIAL = re.compile(rf"\..+\.[0-9a-f]{{8}}-([0-9a-f]+)-{_HERE}\.partial", re.DOTALL)
_HAS_LOCKED_FOLDERS = os.name == "posix"  # elsewhere no open file can be renamed, no folder opened


@contextmanager
def replacing(path: str | os.PathLike[str], durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a file beside `path`, to be written; on success it is fsynced and renamed to `path`.

    It has the mode and owner of the file that it replaces. Of a link the file is replaced that it
    leads to, and the link stays. On an error, `path` is unchanged and the temporary file is
    removed; but if it was whole and could not be renamed, it is kept under a name that the error
    says. An OSError (full disk, no such folder, no permission) becomes a PyggmlError that names
    `path`. Folders and devices are refused at once.

    durable: false for what is checked when it is read and can be made again: a power cut may leave
    half of it
    """
    place, part = Path(path), None
    if not place.name or "\0" in str(place):
        raise PyggmlError(f"{str(place)!r}: cannot be written: this is no name of a file")
    try:
        target = behind_links(place)
        old = _status(target)
        if old is not None and not stat.S_ISREG(old.st_mode):  # a rename would replace it
            raise PyggmlError(f"{place}: cannot be written: it is a {kind_of(old.st_mode)}")
        part = _new_file(target, 0o666 if old is None else 0o600)
        with os.fdopen(os.dup(part.handle), "wb") as out:
            yield out
        if old is not None:
            _keep_status(part.handle, old)
        if durable:
            os.fsync(part.handle)
        part.put(target)
        if durable:
            _sync_folder(target.parent)
    except OSError as error:
        raise PyggmlError(f"{place}: cannot be written: {error.strerror or error}") from error
    finally:
        if part is not None:
            part.end()


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success its files and their names are fsynced, and
    it is `path`.

    On an error it is removed, or kept as a file is. PyggmlError if `path` is anything but an empty
    folder, and for an OSError.
    """
    part = None
    try:
        target = behind_links(Path(path).absolute())
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise PyggmlError(f"{path}: is there already, wanted a new folder or an empty one")
        part = _new_folder(target)
        yield part.path
        for inside in (part.path, *part.path.rglob("*")):
            if inside.is_dir():
                _sync_folder(inside)
                continue
            with inside.open("r+b") as written:
                os.fsync(written.fileno())
        if target.exists():
            target.rmdir()
        part.put(target)
        _sync_folder(target.parent)
    except OSError as error:
        raise PyggmlError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        if part is not None:
            part.end()


def open_to_append(path: str | os.PathLike[str]) -> BinaryIO:
    """A file that is there, to add to its end. OSError, in words, for what is no regular file, or
    has other names."""
    flags = os.O_WRONLY | os.O_APPEND | NO_LINK | NO_WAIT | BINARY
    handle = os.open(behind_links(path), flags)
    if not has_one_name(os.fstat(handle)):
        os.close(handle)
        raise OSError(1, "it is no file, or has other names as well", str(path))
    return os.fdopen(handle, "ab")


# -- what is not whole yet --------------------------------------------------------------------


@dataclass(slots=True)
class _PartialFile:
    """A partial file or folder of this process, and a handle that holds its lock; -1: none."""

    path: Path
    handle: int

    def put(self, target: Path) -> None:
        """Rename what is whole to its target. Windows refuses while another program has that open,
        a server or a virus scanner: it is tried again for some seconds, and what was written is
        kept."""
        if not _HAS_LOCKED_FOLDERS:
            self._close()
        until = monotonic() + _PATIENCE
        while True:
            try:
                self.path.replace(target)
                return
            except PermissionError as error:
                if monotonic() < until:
                    sleep(_PAUSE)
                    continue
                aside = target.with_name(f"{target.name}.{os.getpid()}.new")
                self.path.replace(aside)
                raise PyggmlError(
                    f"{target}: cannot be replaced: {error.strerror or error}; another program may "
                    f"have it open. What was to stand there is kept in {aside}"
                ) from error

    def end(self) -> None:
        """Remove it, unless it has been put to its target."""
        if not _HAS_LOCKED_FOLDERS:
            self._close()
        _remove(self.path)
        self._close()

    def _close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1


def _new_file(target: Path, mode: int) -> _PartialFile:
    _remove_left(target.parent.absolute())
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_LINK | BINARY
    path = _name(target)
    return _lock(path, os.open(path, flags, mode))


def _new_folder(target: Path) -> _PartialFile:
    _remove_left(target.parent.absolute())
    path = _name(target)
    path.mkdir()
    return _lock(path, os.open(path, os.O_RDONLY) if _HAS_LOCKED_FOLDERS else -1)


def _name(target: Path) -> Path:
    """A name beside the target that nobody has; 0 stands for the inode, which is not there yet."""
    return target.with_name(f".{target.name[:_LONGEST]}.{secrets.token_hex(4)}-0-{_HERE}.partial")


def _lock(path: Path, handle: int) -> _PartialFile:
    """What was just made, locked, under a name that says its inode."""
    part = _PartialFile(path, handle)
    if _HAS_LOCKED_FOLDERS:
        try:
            with suppress(OSError):  # a disk without locks: nobody will remove it
                try_lock(handle)
            inode = os.fstat(handle).st_ino
            part.path = path.rename(path.with_name(f"-{inode:x}-".join(path.name.rsplit("-0-", 1))))
        except BaseException:
            part.end()
            raise
    return part


@cache
def _remove_left(folder: Path) -> None:
    """Remove what processes of this machine that are gone have left in a folder."""
    with suppress(OSError):
        for path in folder.iterdir():
            match = _PARTIAL.fullmatch(path.name)
            if match:
                with suppress(OSError):
                    _remove_if_left(path, int(match[1], 16))


def _remove_if_left(path: Path, inode: int) -> None:
    if not _HAS_LOCKED_FOLDERS:  # there what is open cannot be removed
        path.unlink()
        return
    if path.lstat().st_ino != inode:  # another file: a copy, or somebody's own
        return
    handle = os.open(path, os.O_RDONLY | NO_LINK | NO_WAIT)
    try:
        status = os.fstat(handle)
        is_ours = status.st_uid == os.geteuid() and status.st_ino == inode
        is_plain = stat.S_ISDIR(status.st_mode) or has_one_name(status)
        if is_ours and is_plain and try_lock(handle):
            _remove(path)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    """After success, or if it was never made, there is none."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _status(target: Path) -> os.stat_result | None:
    try:
        return target.stat()
    except FileNotFoundError:
        return None


def _keep_status(handle: int, old: os.stat_result) -> None:
    """Give a file the owner, if that is allowed, and the mode of the one that it replaces."""
    if hasattr(os, "fchown"):
        with suppress(OSError):
            os.fchown(handle, old.st_uid, old.st_gid)
        os.fchmod(handle, stat.S_IMODE(old.st_mode) & 0o777)


def _sync_folder(folder: Path) -> None:
    """Make names in a folder survive a power cut. Windows opens none, and needs no help."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
