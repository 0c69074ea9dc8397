"""Metadata and tensors → a GGUF file of version 3, one tensor in memory at a time.

The header comes first and has every offset, so all names, types and shapes are given beforehand. A
tensor's array may be a callable; it is called just before the tensor is written.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pyggml.errors import GGUFError
from pyggml.files import replacing
from pyggml.gguf.fields import Field, ValueType, brief, string
from pyggml.gguf.parse import (
    MAGIC,
    MAX_NAME_BYTES,
    checked_alignment,
    n_bytes,
    shape_fault,
    stored_shape,
)
from pyggml.graph.dtypes import DType
from pyggml.sizes import round_up

MAX_TENSOR_NAME_BYTES = 63  # llama.cpp's limit: GGML_MAX_NAME without the final zero
TensorSource = tuple[str, DType, tuple[int, ...], np.ndarray | Callable[[], np.ndarray]]


def write(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Iterable[TensorSource],
    durable: bool = True,
) -> None:
    """Write a GGUF file atomically: on failure, the old file at `path` is unchanged.

    metadata   key → a Field, written unchanged, or any value for `Field.of`; general.alignment is
               obeyed
    tensors    (name, dtype, shape in NumPy's order, array or callable returning it); the array has
               the dtype and shape of `GGUFFile.data`
    durable    whether a power cut after it loses nothing of it: as `pyggml.files.replacing` has it

    GGUFError for metadata or tensors impossible in GGUF; PyggmlError if the disk refuses.
    """
    path, sources = Path(path), list(tensors)
    try:
        fields = _fields(metadata)
        alignment = checked_alignment(fields)
        _check_tensors(sources)
        with replacing(path, durable) as out:
            _write_header(out, fields, sources, alignment)
            for source in sources:
                _write_tensor(out, source)
                _pad(out, alignment)
    except GGUFError as error:
        raise GGUFError(f"{path}: cannot be written: {error}") from error


def reserve(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Iterable[tuple[str, DType, tuple[int, ...]]],
) -> None:
    """Write a GGUF file whose tensors are all 0, to be filled where they lie; as `write` does."""
    path, sources = Path(path), [(*each, _no_array) for each in tensors]
    fields = _fields(metadata)
    alignment = checked_alignment(fields)
    _check_tensors(sources)
    with replacing(path) as out:
        _write_header(out, fields, sources, alignment)
        sizes = (round_up(n_bytes(shape, dtype), alignment) for _, dtype, shape, _ in sources)
        out.truncate(out.tell() + sum(sizes))


def _no_array() -> np.ndarray:
    raise AssertionError("what is reserved has no array")


def _fields(metadata: Mapping[str, Any]) -> dict[str, Field]:
    fields = {}
    for key, value in metadata.items():
        try:
            fields[key] = Field.of(value)
        except GGUFError as error:
            raise GGUFError(f"metadata key {brief(key)}: {error}") from None
        if not 8 < len(string(key)) <= 8 + MAX_NAME_BYTES:
            raise GGUFError(f"metadata key {brief(key)} is not 1 to {MAX_NAME_BYTES} bytes long")
    return fields


def _check_tensors(sources: Sequence[TensorSource]) -> None:
    """GGUFError with every fault in names, types and shapes."""
    wrong, names = [], set()
    for name, dtype, shape, _ in sources:
        if name in names:
            wrong.append(f"there are two tensors {brief(name)}")
        names.add(name)
        if not 8 < len(string(name)) <= 8 + MAX_TENSOR_NAME_BYTES:
            wrong.append(f"tensor name {brief(name)} is not 1 to {MAX_TENSOR_NAME_BYTES} bytes")
        fault = shape_fault(shape, dtype)
        if fault:
            wrong.append(f"tensor {brief(name)} {fault}")
    if wrong:
        raise GGUFError("; ".join(wrong))


def _write_header(
    out: BinaryIO, fields: Mapping[str, Field], sources: Sequence[TensorSource], alignment: int
) -> None:
    out.write(MAGIC + _u32(3) + _u64(len(sources)) + _u64(len(fields)))
    for key, field in fields.items():
        out.write(string(key))
        if field.n is None:
            out.write(_u32(field.type))
        else:
            out.write(_u32(ValueType.ARRAY) + _u32(field.type) + _u64(field.n))
        out.write(field.payload)
    offset = 0
    for name, dtype, shape, _ in sources:
        out.write(string(name) + _u32(len(shape)) + b"".join(_u64(n) for n in reversed(shape)))
        out.write(_u32(dtype.number) + _u64(offset))
        offset += n_bytes(shape, dtype)
        offset = round_up(offset, alignment)
    _pad(out, alignment)


def _write_tensor(out: BinaryIO, source: TensorSource) -> None:
    name, dtype, shape, given = source
    array = given() if callable(given) else given
    stored = stored_shape(shape, dtype)
    if array.dtype != dtype.numpy or array.shape != stored:
        raise GGUFError(
            f"tensor {brief(name)} got an array of {array.dtype} {array.shape},"
            f" wanted {dtype.numpy} {stored} for {dtype.name} {shape}"
        )
    out.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _pad(out: BinaryIO, alignment: int) -> None:
    out.write(bytes(-out.tell() % alignment))


def _u32(number: int) -> bytes:
    return int(number).to_bytes(4, "little")


def _u64(number: int) -> bytes:
    return int(number).to_bytes(8, "little")
