"""Sources as they are given → files: those of a folder or of a pattern, and the content of pipes.

given                       files
a file                      itself
a folder                    all files in it and below, sorted by path, that hold data
a pattern such as *.jsonl   those that fit, sorted by path
- or a pipe                 a copy of what comes through, for a file is read more than once

What of a folder holds no data is left out by name, as is plain text beside files of rows, such as a
README; hidden files are not looked at.
"""

import glob
import io
import os
import shutil
import stat
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

from pyggml.chat.messages import BadValue
from pyggml.errors import DataError, cause_of
from pyggml.lora.data.formats.packed import PARQUET_MAGIC, packing
from pyggml.lora.data.formats.source import HEAD_BYTES, MOST_BYTES, head
from pyggml.lora.data.reading.files import format_of, records
from pyggml.lora.data.reading.sources import Source
from pyggml.lora.data.records import Schema

STDIN = Path("-")
_STDIN = 0  # its descriptor
MOST_FILES = 1 << 16  # in a folder
PATIENCE = 2.0  # seconds before it is said that nothing comes
MOST_PATIENCE = 60.0  # seconds in which somebody has to open the other end of a pipe
LeftOut = tuple[Path, str]  # a file and the reason


def expand(sources: Iterable[Source], schema: Schema) -> tuple[list[Source], tuple[LeftOut, ...]]:
    """The files of these sources, with their weights, and what of folders was left out.

    Raises DataError, with all faults, for folders without data, patterns that fit nothing, and
    pipes that cannot be read.
    """
    files, left_out, faults = list[Source](), list[LeftOut](), list[str]()
    for source in sources:
        if source.rows is not None:
            files.append(source)
            continue
        try:
            paths, skipped = _files(source.path, schema)
            files += [replace(source, path=path) for path in paths]
            left_out += skipped
        except DataError as error:
            faults.append(str(error))
    if faults:
        raise DataError(faults)
    return files, tuple(left_out)


def _files(path: Path, schema: Schema) -> tuple[list[Path], list[LeftOut]]:
    try:
        about = os.fstat(_STDIN) if path == STDIN else path.stat()
    except (OSError, ValueError):  # ValueError: a NUL
        return _fitting(path), []
    mode = about.st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):  # which may have no end
        if path != STDIN:
            raise DataError(f"{path}: cannot be read: it is a pipe or device, wanted a file")
        kind = "terminal" if os.isatty(_STDIN) else "device"
        raise DataError(f"-: standard input is a {kind}, wanted a pipe or a file")
    if stat.S_ISDIR(mode):
        return _of_folder(path, schema)
    if path == STDIN or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        return [_copy(about.st_dev, about.st_ino, path)], []
    return [path], []


def _fitting(pattern: Path) -> list[Path]:
    """The files of a pattern; the path itself if it is none."""
    if not glob.has_magic(str(pattern)):
        return [pattern]
    # Path.glob takes no pattern that is absolute.
    named = glob.glob(str(pattern), recursive=True)  # noqa: PTH207
    files = sorted(p for p in map(Path, named) if p.is_file())
    if not files:
        raise DataError(f"{pattern}: no file fits this pattern")
    return files


# -- folders ------------------------------------------------------------------------------------


def _of_folder(folder: Path, schema: Schema) -> tuple[list[Path], list[LeftOut]]:
    kinds, left_out = dict[Path, str](), list[LeftOut]()
    for path in _visible(folder):
        try:
            kinds[path] = _kind(path, schema)
        except DataError as error:
            left_out.append((path, str(error).removeprefix(f"{path}: ")))
    if any(kind != "text" for kind in kinds.values()):
        texts = [path for path, kind in kinds.items() if kind == "text"]
        left_out += [(path, "is plain text beside files of rows") for path in texts]
        kinds = {path: kind for path, kind in kinds.items() if kind != "text"}
    if not kinds:
        first = f": {left_out[0][0].name} {left_out[0][1]}" if left_out else ""
        raise DataError(f"{folder}: this folder holds no data{first}")
    return list(kinds), sorted(left_out)


def _visible(folder: Path) -> list[Path]:
    """The files of a folder and below, sorted, without hidden ones."""
    files = []
    for path in folder.rglob("*"):
        if _may_be_read(path) and not any(
            p.startswith(".") for p in path.relative_to(folder).parts
        ):
            files.append(path)
        if len(files) > MOST_FILES:
            raise DataError(f"{folder}: this folder holds more than {MOST_FILES:,} files")
    return sorted(files)


def _may_be_read(path: Path) -> bool:
    """Whether this is a file, or nobody may say so: then it is left out by name."""
    try:
        return path.is_file()
    except OSError:
        return True


def _kind(path: Path, schema: Schema) -> str:
    """The format of a file with data. DataError, with the reason, for any other."""
    kind = format_of(path, schema)
    if kind == "text":
        start = head(path)
        if b"\0" in start or "\ufffd" in start[:-4].decode(errors="replace"):
            raise DataError(f"{path}: is neither text in UTF-8 nor rows")
        return kind
    _, first = next(iter(records(path, kind, schema)), (None, BadValue("is none")))
    if not isinstance(first, BadValue) and not (isinstance(first, dict) and schema.has_row(first)):
        raise DataError(f"{path}: is {kind} without the names of rows")
    return kind


# -- pipes --------------------------------------------------------------------------------------


@cache
def _copy(device: int, inode: int, path: Path) -> Path:
    """A file with all that comes through a pipe, which a process reads once; device and inode tell
    one pipe from another."""
    name = "stdin" if path == STDIN else path.name
    copy = Path(_folder().name, f"{device}-{inode}", name)
    try:
        copy.parent.mkdir(exist_ok=True)
        with _open_pipe(path) as pipe, copy.open("wb") as to:
            to.write(_beginning(pipe, path))
            shutil.copyfileobj(pipe, to)
    except OSError as error:
        raise DataError(f"{path}: cannot be copied to {copy}: {cause_of(error)}") from error
    return copy


@contextmanager
def _open_pipe(path: Path) -> Iterator[io.BufferedReader]:
    """A pipe through which something has come, or nothing will. Says what is awaited, if it is."""
    late = f"{path}: nothing has come through this pipe yet, waiting for what writes to it"
    timer = threading.Timer(PATIENCE, warnings.warn, (late, RuntimeWarning))
    timer.daemon = True
    timer.start()
    last, was_alone = threading.Timer(0, lambda: None), list[bool]()
    if path != STDIN:
        last, was_alone = _give_up_after(path, MOST_PATIENCE)
    try:
        given = _STDIN if path == STDIN else path
        with open(given, "rb", closefd=path != STDIN) as pipe:
            last.cancel()  # whoever has opened the other end may take any time
            if was_alone:
                raise DataError(f"{path}: nobody writes to this pipe, wanted a file")
            pipe.peek(1)
            timer.cancel()
            yield pipe
    finally:
        timer.cancel()
        last.cancel()


def _give_up_after(path: Path, seconds: float) -> tuple[threading.Timer, list[bool]]:
    """A timer that opens the other end of a pipe, if nobody does, so that nothing waits for ever;
    and a list that is no longer empty then."""
    was_alone = list[bool]()

    def open_other_end() -> None:
        was_alone.append(True)
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))

    timer = threading.Timer(seconds, open_other_end)
    timer.daemon = True
    timer.start()
    return timer, was_alone


def _beginning(pipe: io.BufferedReader, path: Path) -> bytes:
    """What comes through a pipe up to its first block with text.

    DataError for what may go on for ever without any: NULs, and more white space than a row has.
    """
    start = block = pipe.read(HEAD_BYTES)
    while block and not block.strip():
        if len(start) > MOST_BYTES:
            raise DataError(f"{path}: begins with {MOST_BYTES >> 20} MiB of white space")
        start += (block := pipe.read(HEAD_BYTES))
    if b"\0" in start and not (start.startswith(PARQUET_MAGIC) or packing(start)):
        raise DataError(f"{path}: holds a NUL, wanted UTF-8 text")
    return start


def shown_path(path: Path) -> str:
    """A file as the user knows it: the copy of a pipe by the pipe's name."""
    return path.name if path.parent.parent == Path(_folder().name) else str(path)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where copies lie until the process ends."""
    return tempfile.TemporaryDirectory(prefix="pyggml-")
