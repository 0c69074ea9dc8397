"""A GGUF file as a memory map: metadata decoded on access, tensors as views without a copy.

A model in several files is one GGUFFile with the metadata of the first and the tensors of all.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, overload

import numpy as np

from pyggml.errors import GGUFError
from pyggml.gguf import split
from pyggml.gguf.fields import Field, brief
from pyggml.gguf.mapped import MappedFile, map_file
from pyggml.gguf.parse import Contents, TensorInfo, parse

T = TypeVar("T")


class GGUFFile:
    """An open GGUF file. `close` ends access; arrays obtained before stay valid.

    path      the path given to `open`
    paths     all files of the model, in order
    n_bytes   size of all files together

    A mapped file must not be changed: see `pyggml.gguf.mapped`. `write` is safe, as it replaces the
    whole file.
    """

    def __init__(self, path: Path, paths: Sequence[Path], parts: Sequence[Contents]) -> None:
        self.path, self.paths = path, tuple(paths)
        self.version = parts[0].version
        self.alignment = parts[0].alignment
        self.n_bytes = sum(len(part.view) for part in parts)
        self._parts = tuple(parts)  # none after `close`
        self._tensors = parts[0].tensors
        if len(parts) > 1:
            self._tensors = MappingProxyType({k: t for p in parts for k, t in p.tensors.items()})

    @property
    def metadata(self) -> Mapping[str, Field]:
        """Every metadata value with its type, in the file's order."""
        return self._open_parts()[0].metadata

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Name, shape, dtype and offset of every tensor, in the file's order."""
        self._open_parts()
        return self._tensors

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, of any type; `default` if the key is missing.

        int, float, bool or str; a read-only array of numbers, or a StringArray.
        """
        field = self.metadata.get(key)
        return default if field is None else field.value

    def require(self, key: str, kind: type[T]) -> T:
        """The value of a required key, of exactly this type; an int is no float.

        `kind` is int, float, bool, str, np.ndarray or StringArray.
        GGUFError names the key, its type in the file and the type wanted.
        """
        field = self.metadata.get(key)
        if field is None:
            raise GGUFError(
                f"{self.path}: metadata key {brief(key)} is missing, wanted {kind.__name__}"
            )
        value = field.value
        if type(value) is not kind:
            raise GGUFError(
                f"{self.path}: metadata key {brief(key)} is {field.kind}, wanted {kind.__name__}"
            )
        return value

    @overload
    def optional(self, key: str, kind: type[T]) -> T | None: ...
    @overload
    def optional(self, key: str, kind: type[T], default: T) -> T: ...
    def optional(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """As `require`, but `default` if the key is missing."""
        return self.require(key, kind) if key in self.metadata else default

    def word(self, key: str) -> str:
        """The value of a key that is a string; "" without one, and for any other type."""
        value = self.get(key)
        return value if isinstance(value, str) else ""

    def data(self, name: str) -> np.ndarray:
        """Read-only view of a tensor, in NumPy order.

        Plain types have the tensor's shape; BF16 comes as uint16; a quantised type comes as uint8
        of shape (*shape[:-1], bytes of a row). GGUFError if there is no such tensor.
        """
        part = next((p for p in self._open_parts() if name in p.tensors), None)
        if part is None:
            raise GGUFError(f"{self.path}: has no tensor {brief(name)}")
        info = part.tensors[name]
        raw = part.view[info.offset : info.offset + info.n_bytes]
        return np.frombuffer(raw, info.dtype.numpy).reshape(info.stored_shape)

    def check(self) -> None:
        """FileChangedError if a file of the model was changed since it was opened."""
        for part in self._open_parts():
            if isinstance(part.view.obj, MappedFile):
                part.view.obj.check()

    def close(self) -> None:
        """End access. The file stays mapped until its last array is freed."""
        self._parts = ()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_parts(self) -> tuple[Contents, ...]:
        if not self._parts:
            raise GGUFError(f"{self.path}: has been closed")
        return self._parts


def open(path: str | os.PathLike[str]) -> GGUFFile:
    """Map and check a GGUF file of version 2 or 3. `path` may be any part of a model in several.

    GGUFError names the path and the reason: the file cannot be opened, is not GGUF, violates the
    format (counts, types, shapes, alignment, offsets, duplicate names), or parts are missing or
    belong to different models.
    """
    path = Path(path)
    try:
        contents = parse(_map_file(path))
        if split.n_parts(contents.metadata) == 1:
            return GGUFFile(path, [path], [contents])
        paths = split.paths(path, contents.metadata)
        return GGUFFile(
            path, paths, split.read(paths, lambda p: contents if p == path else _part(p))
        )
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise GGUFError(f"{path}: cannot be opened: {reason}") from error
    except GGUFError as error:
        raise GGUFError(f"{path}: {error}") from None


def _part(path: Path) -> Contents:
    """The contents of one part; its file name begins every error."""
    try:
        return parse(_map_file(path))
    except OSError as error:
        raise GGUFError(f"{path.name} cannot be opened: {error.strerror or error}") from error
    except GGUFError as error:
        raise GGUFError(f"{path.name}: {error}") from None


def _map_file(path: Path) -> memoryview:
    """The file's bytes, read-only."""
    mapped = map_file(path)
    _ask_for_huge_pages(mapped)
    return memoryview(mapped)


def _ask_for_huge_pages(mapped: mmap.mmap) -> None:
    """Have Linux read the file in pages of 2 MB, where the file system has such pages.

    Mapping and releasing a weight then costs next to nothing. What lies in the system's cache
    already stays as it is.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
