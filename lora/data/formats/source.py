"""A file's bytes → its lines, or its text in blocks, read as a stream within bounds.

A fault of the whole file is a DataError that names it. `BadValue` is a fault of one record: the
reader goes on after it.
"""

import codecs
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from pyggml.chat.messages import BadValue
from pyggml.errors import DataError, cause_of
from pyggml.files import first_hole, open_regular
from pyggml.lora.data.formats.packed import PARQUET_MAGIC, packing, unpack
from pyggml.lora.data.records.rows import RowPlace

MOST_BYTES = 32 << 20  # of one line or record
HEAD_BYTES = 1 << 20  # what a format is told by
_BLOCK = 1 << 15
_BOM = codecs.BOM_UTF8  # which some editors put at the start of a file
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def open_file(path: Path) -> BufferedReader:
    """The file, to read its bytes; of a compressed one those of its content.

    Raises DataError as `open_bytes` does, for UTF-16, and as `unpack` does.
    """
    content = unpack(path, open_bytes(path))
    if content.peek(2)[:2] in _UTF_16:
        content.close()
        raise DataError(f"{path}: is UTF-16, wanted UTF-8: save it as that")
    return content


def open_bytes(path: Path) -> BufferedReader:
    """The file as it lies on the disk.

    Raises DataError if it cannot be read, is no regular file, or is a text with holes: these are
    NULs, which no text has, and there may be terabytes of them.
    """
    try:
        file = open_regular(path)  # a pipe cannot be read twice, a device may never end
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise DataError(f"{path}: cannot be read: {cause_of(error)}") from error
    start = file.peek(4)[:4]
    hole = None if start == PARQUET_MAGIC or packing(start) else first_hole(file)
    if hole is not None:
        file.close()
        raise DataError(f"{path}: nothing was ever written at byte {hole:,}, wanted text")
    return file


def head(path: Path) -> bytes:
    """The first bytes of a file, without a byte order mark. DataError if it holds white space."""
    with open_file(path) as file:
        start = file.read(HEAD_BYTES)
        blank = not start.strip()
        while blank and (more := file.read(_BLOCK)):
            blank = not more.strip()
    if blank:
        raise DataError(f"{path}: is empty, wanted text")
    return start.removeprefix(_BOM)


def lines(path: Path) -> Iterator[str | BadValue]:
    """The text of every line, ends kept, marks removed; BadValue if it is too long or not UTF-8."""
    start = 0
    with open_file(path) as file:
        while raw := file.readline(MOST_BYTES + 1):
            n_bytes = len(raw)
            if b"\0" in raw:
                raise DataError(f"{path}: byte {start + raw.index(0):,} is NUL, wanted UTF-8 text")
            if n_bytes > MOST_BYTES:
                n_bytes += _skip_line(file, raw)
                yield BadValue(f"is longer than {MOST_BYTES >> 20} MiB")
            else:
                yield _decode(raw, start)
            start += n_bytes


def _skip_line(file: BinaryIO, raw: bytes) -> int:
    """Read on to the end of a line; how many bytes that were."""
    n_bytes = 0
    while not raw.endswith(b"\n") and (raw := file.readline(_BLOCK)):
        n_bytes += len(raw)
    return n_bytes


def _decode(raw: bytes, start: int) -> str | BadValue:
    try:
        return raw.removeprefix(_BOM).decode()  # also where files with marks were put together
    except UnicodeDecodeError as error:
        byte = start + error.start + (len(raw) - len(error.object))
        return BadValue(_not_utf_8(byte, error.object[error.start]), joint=": ")


def _not_utf_8(at: int, byte: int) -> str:
    """Windows' programs, Excel among them, write cp1252 where nothing else is asked for."""
    letter = bytes([byte]).decode("cp1252", "replace")
    hint = f"; in Windows' cp1252 it is {letter}: save the file as UTF-8" * letter.isprintable()
    return f"byte {at} is 0x{byte:02x}, which is not UTF-8 there{hint}"


def whole_lines(path: Path) -> Iterator[str]:
    """The same for formats whose records span lines: DataError for a bad one."""
    for number, line in enumerate(lines(path), 1):
        if isinstance(line, BadValue):
            raise DataError(f"{path}: {line.at(RowPlace(str(path), 'line', number))}")
        yield line


def blocks(path: Path) -> Iterator[str]:
    """The text, some kilobytes at a time, line ends as they are, without a mark.

    Raises DataError for what is not UTF-8, with line and byte, and for a NUL.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    start, line = 0, 1
    with open_file(path) as file:
        while True:
            raw = file.read(_BLOCK)
            kept = decoder.getstate()[0]  # the start of a character
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                line += (kept + raw).count(b"\n", 0, error.start)
                at = start - len(kept) + error.start
                fault = _not_utf_8(at, error.object[error.start])
                raise DataError(f"{path}: line {line}: {fault}") from None
            if "\0" in text:
                line += text.count("\n", 0, text.index("\0"))
                raise DataError(f"{path}: line {line}: holds a NUL, wanted UTF-8 text")
            yield text.removeprefix("\ufeff") if not start else text
            if not raw:
                return
            start, line = start + len(raw), line + text.count("\n")
