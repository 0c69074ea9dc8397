"""Compressed files, told by their first bytes, → what is in them, as a stream."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pyggml.errors import DataError
from pyggml.extras import how_to_install

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

SUFFIXES = (".gz", ".zst")
PARQUET_MAGIC = b"PAR1"  # the start of a file that packs by itself
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_MOST_RATIO, _FREE_BYTES = 300, 64 << 20  # beyond so many bytes a file may not grow more


def suffix_of(path: Path) -> str:
    """The ending of a name that tells of the content: .jsonl of a.jsonl.gz."""
    inner = path.with_suffix("") if path.suffix.lower() in SUFFIXES else path
    return inner.suffix.lower()


def packing(start: bytes) -> str:
    """What a file that begins so is compressed by; "" if it is not."""
    return next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), "")


def unpack(path: Path, file: io.BufferedReader) -> io.BufferedReader:
    """The file, or what is in it. Its place is at the start.

    Raises DataError for Zstandard without pyarrow; reading does so for a damaged file, and for one
    that grows without bounds.
    """
    kind = packing(file.peek(4))
    if not kind:
        return file
    return io.BufferedReader(_Unpacker(path, file, _stream(path, file, kind)), 1 << 16)


class _PackedStream(Protocol):
    """What is in a compressed file."""

    def read(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


def _stream(path: Path, file: io.BufferedReader, kind: str) -> _PackedStream:
    if kind == "gzip":
        return gzip.GzipFile(fileobj=file)
    try:
        from pyarrow import CompressedInputStream, PythonFile
    except ImportError:
        file.close()
        raise DataError(
            f"{path}: is compressed by Zstandard, which needs pyarrow: {how_to_install('parquet')}"
        ) from None
    stream: _PackedStream = CompressedInputStream(PythonFile(file, "r"), "zstd")
    return stream


class _Unpacker(io.RawIOBase):
    """The bytes in a compressed file, counted."""

    def __init__(self, path: Path, file: io.BufferedReader, stream: _PackedStream) -> None:
        self._path, self._file, self._stream = path, file, stream
        self._n, self._n_packed = 0, path.stat().st_size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer)
        try:
            block = self._stream.read(len(view))
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{self._path}: cannot be unpacked: {error}") from None
        self._n += len(block)
        if self._n > max(_FREE_BYTES, _MOST_RATIO * self._n_packed):
            raise DataError(
                f"{self._path}: unpacks to more than {_MOST_RATIO} times its size, wanted data"
            )
        view[: len(block)] = block
        return len(block)

    def close(self) -> None:
        self._stream.close()
        self._file.close()
        super().close()
