"""Arrays that may be larger than memory: small ones are in memory, large ones in a file on disk.

The file has no name. It is gone when the array is freed or the process ends, in any way.
"""

import os
import shutil
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import IO

import numpy as np

from pyggml.errors import PyggmlError, cause_of

_IN_MEMORY = 4 << 20  # bytes of an array up to which it lies in memory
BLOCK = 1 << 18  # numbers that a pass over an array takes at a time
_CODES = {("i", 4): "i", ("i", 8): "q", ("b", 1): "b", ("f", 4): "f"}


def empty(shape: tuple[int, ...], dtype: type[np.generic], folder: Path | None) -> np.ndarray:
    """An array with undefined content. `folder` is the place of its file; None: the system's
    choice.

    Raises PyggmlError if the disk has no room: writing to a mapped page without room would kill the
    process.
    """
    n_bytes = prod(shape) * np.dtype(dtype).itemsize
    if n_bytes <= _IN_MEMORY:
        return np.empty(shape, dtype)
    with _unnamed_file(folder) as file:
        _reserve(file, n_bytes, folder)
        return np.memmap(file, dtype, "r+", shape=shape).view(np.ndarray)


class GrowingArray:
    """A one-dimensional array that grows at its end."""

    def __init__(self, dtype: type[np.generic], folder: Path | None) -> None:
        self._dtype, self._folder = np.dtype(dtype), folder
        self._held = array(_CODES[self._dtype.kind, self._dtype.itemsize])  # not yet in the file
        self._file: IO[bytes] | None = None
        self.n = 0

    def extend(self, values: Sequence[int] | np.ndarray) -> None:
        """Add numbers. Raises PyggmlError if the disk has no room."""
        if isinstance(values, np.ndarray):
            self._held.frombytes(values.astype(self._dtype).tobytes())
        else:
            self._held.extend(values)
        self.n += len(values)
        if len(self._held) * self._dtype.itemsize > _IN_MEMORY:
            self._flush()

    def finish(self) -> np.ndarray:
        """All numbers; the column takes no more."""
        if self._file is None:
            return np.frombuffer(self._held, self._dtype)
        self._flush()
        with self._file as file:
            return np.memmap(file, self._dtype, "r", shape=(self.n,)).view(np.ndarray)

    def _flush(self) -> None:
        if self._file is None:
            self._file = _unnamed_file(self._folder)
        try:
            self._held.tofile(self._file)
            self._file.flush()
        except OSError as error:
            raise _no_room(self._folder, error) from error
        del self._held[:]


def blocks(values: np.ndarray) -> Iterator[np.ndarray]:
    """The array in parts along its first axis, each of some hundred thousand numbers."""
    n = max(BLOCK // max(prod(values.shape[1:]), 1), 1)
    for first in range(0, len(values), n):
        yield values[first : first + n]


def _unnamed_file(folder: Path | None) -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(dir=folder)
    except OSError as error:
        raise _no_room(folder, error) from error


def _reserve(file: IO[bytes], n_bytes: int, folder: Path | None) -> None:
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, n_bytes)
        else:
            if shutil.disk_usage(folder or tempfile.gettempdir()).free < n_bytes:
                raise OSError(28, "no space left on the disk")
            file.truncate(n_bytes)
    except OSError as error:
        raise _no_room(folder, error) from error


def _no_room(folder: Path | None, error: OSError) -> PyggmlError:
    where = folder or tempfile.gettempdir()
    return PyggmlError(f"{where}: tokens cannot be written there: {cause_of(error)}")
