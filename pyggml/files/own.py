"""Whose a file is: links are followed where they are this user's, and files have one name."""

import os
import stat
from contextlib import suppress
from pathlib import Path

# Of `os.open`: no link is followed, nothing blocks. Windows has neither, nor such links and pipes.
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
NO_WAIT = getattr(os, "O_NONBLOCK", 0)
BINARY = getattr(os, "O_BINARY", 0)


def behind_links(path: str | os.PathLike[str]) -> Path:
    """What a path names: of a link the file that it leads to, which need not be there yet.

    OSError for a link to itself, and for one that another user has laid there.
    """
    place = Path(path)
    if not place.is_symlink():
        return place
    if os.name == "posix" and place.lstat().st_uid not in (0, os.geteuid()):
        raise PermissionError(1, "it is a link that belongs to another user", str(path))
    with suppress(FileNotFoundError):  # what a link leads to; one to itself is another error
        place.stat()
    return Path(os.path.realpath(place))


def in_characters(path: str | os.PathLike[str]) -> str:
    """A path or name as text that every file can hold: bytes that are no UTF-8 become \\xe4."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def kind_of(mode: int) -> str:
    """What a file of this mode is, in a word."""
    if stat.S_ISREG(mode):
        return "file"
    return "folder" if stat.S_ISDIR(mode) else "pipe or device"


def has_one_name(status: os.stat_result) -> bool:
    """Whether it is a regular file that no other name leads to: what is written changes no other
    file."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1
