"""Bytes of a GGUF file → `Contents`. Every value in the file is checked before its use.

Counts are bounded by the remaining bytes; products are Python integers, which cannot overflow. A
violated rule raises GGUFError with one sentence, to which `open` adds the path.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from pyggml.errors import GGUFError
from pyggml.gguf.fields import SCALARS, Field, ValueType, brief, string_bounds
from pyggml.graph.dtypes import BY_NUMBER, DType
from pyggml.sizes import round_up

MAGIC = b"GGUF"
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_NAME_BYTES = (1 << 16) - 1  # GGUF's limit for keys; also applied to tensor names
MAX_DIMS = 4  # GGML_MAX_DIMS
MIN_FIELD_BYTES = 8 + 1 + 4 + 1  # key of one character, type, a one-byte value
MIN_INFO_BYTES = 8 + 4 + 8 + 4 + 8  # empty name, n_dims, one axis, type, offset


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a file.

    shape     in NumPy's order, outermost axis first
    offset    bytes from the start of the file
    n_bytes   size of its data
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    offset: int
    n_bytes: int

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of its array of `dtype.numpy`; of a quantised type, (*shape[:-1], row_bytes)."""
        return stored_shape(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class Contents:
    """The index of a checked file: every offset and length lies within `view`."""

    view: memoryview
    version: int
    alignment: int
    metadata: Mapping[str, Field]
    tensors: Mapping[str, TensorInfo]


def stored_shape(shape: tuple[int, ...], dtype: DType) -> tuple[int, ...]:
    return (*shape[:-1], dtype.row_bytes(shape[-1])) if dtype.quantised else shape


def n_bytes(shape: tuple[int, ...], dtype: DType) -> int:
    return math.prod(shape[:-1]) * dtype.row_bytes(shape[-1])


def shape_fault(shape: tuple[int, ...], dtype: DType) -> str | None:
    """Why no tensor of this type can have this shape, or None if one can."""
    if not 1 <= len(shape) <= MAX_DIMS or min(shape) < 1:
        return f"has shape {shape}, wanted 1 to {MAX_DIMS} axes of at least 1"
    if shape[-1] % dtype.block:
        return (
            f"has rows of {shape[-1]} elements,"
            f" wanted a multiple of {dtype.name}'s block of {dtype.block}"
        )
    return None


def parse(view: memoryview) -> Contents:
    """Check and index a whole file. GGUFError names the first violated rule."""
    cursor = _Cursor(view)
    version = _version(cursor)
    n_tensors, n_fields = cursor.number(8), cursor.number(8)
    cursor.expect(n_fields, MIN_FIELD_BYTES, "metadata keys")
    metadata: dict[str, Field] = {}
    for i in range(n_fields):
        cursor.where = f"metadata key {i}"
        key = cursor.name()
        if not key or key in metadata:
            raise GGUFError(f"metadata key {i} is {'empty' if not key else f'{brief(key)} again'}")
        cursor.where = f"the value of {brief(key)}"
        metadata[key] = _field(cursor)
    alignment = checked_alignment(metadata)
    cursor.where = "the header"
    cursor.expect(n_tensors, MIN_INFO_BYTES, "tensors")
    tensors = _tensors(cursor, n_tensors, alignment)
    return Contents(view, version, alignment, MappingProxyType(metadata), MappingProxyType(tensors))


def checked_alignment(metadata: Mapping[str, Field]) -> int:
    """The alignment of tensor offsets in bytes: general.alignment, by default 32."""
    field = metadata.get(ALIGNMENT_KEY)
    if field is None:
        return DEFAULT_ALIGNMENT
    if field.type is not ValueType.UINT32 or field.n is not None:
        raise GGUFError(f"{ALIGNMENT_KEY} is {field.kind}, wanted UINT32")
    alignment = int.from_bytes(field.payload, "little")
    if alignment.bit_count() != 1 or not 8 <= alignment <= MAX_ALIGNMENT:
        raise GGUFError(
            f"{ALIGNMENT_KEY} is {alignment}, wanted a power of two from 8 to {MAX_ALIGNMENT}"
        )
    return alignment


class _Cursor:
    """A position in the file. `where` names it in error messages."""

    def __init__(self, view: memoryview) -> None:
        self.view, self.position, self.where = view, 0, "the header"

    @property
    def remaining(self) -> int:
        return len(self.view) - self.position

    def take(self, n: int) -> memoryview:
        if n > self.remaining:
            raise GGUFError(
                f"{self.where} needs {n} bytes at byte {self.position},"
                f" but only {self.remaining} remain in the file"
            )
        self.position += n
        return self.view[self.position - n : self.position]

    def number(self, n_bytes: int) -> int:
        return int.from_bytes(self.take(n_bytes), "little")

    def name(self) -> str:
        n = self.number(8)
        if n > MAX_NAME_BYTES:
            raise GGUFError(
                f"{self.where} has a name of {n} bytes, wanted at most {MAX_NAME_BYTES}"
            )
        data = bytes(self.take(n))
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise GGUFError(f"{self.where} has a name that is not UTF-8: {brief(data)}") from None

    def expect(self, n: int, n_bytes: int, things: str) -> None:
        """GGUFError if n things of at least n_bytes each exceed the remaining bytes."""
        if n * n_bytes > self.remaining:
            raise GGUFError(
                f"{self.where} claims {n} {things}, which do not fit"
                f" in the {self.remaining} bytes that remain in the file"
            )


def _version(cursor: _Cursor) -> int:
    start = bytes(cursor.view[:4])
    if start != MAGIC[: len(start)]:
        raise GGUFError(f"is not a GGUF file: it starts with {start!r}, not with {MAGIC!r}")
    cursor.take(4)
    version = cursor.number(4)
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
        raise GGUFError("is a big-endian GGUF file, wanted a little-endian one")
    if version not in (2, 3):
        raise GGUFError(f"is a GGUF file of version {version}, wanted version 2 or 3")
    return version


# -- metadata -------------------------------------------------------------------------------------


def _field(cursor: _Cursor) -> Field:
    kind = _value_type(cursor)
    if kind is not ValueType.ARRAY:
        return _single(cursor, kind)
    kind = _value_type(cursor)
    if kind is ValueType.ARRAY:
        raise GGUFError(f"{cursor.where} is an array of arrays, which ggml does not read either")
    n = cursor.number(8)
    if kind is ValueType.STRING:
        cursor.expect(n, 8, "strings")
        try:
            bounds = string_bounds(cursor.view[cursor.position :], n)
        except GGUFError as error:
            raise GGUFError(f"{cursor.where} ends early: {error}") from None
        return Field(kind, n, cursor.take(int(bounds[-1])), bounds)
    cursor.expect(n, SCALARS[kind].itemsize, f"{kind.name} values")
    return _check(cursor, Field(kind, n, cursor.take(n * SCALARS[kind].itemsize)))


def _value_type(cursor: _Cursor) -> ValueType:
    number = cursor.number(4)
    try:
        return ValueType(number)
    except ValueError:
        raise GGUFError(f"{cursor.where} has type number {number}, wanted 0 to 12") from None


def _single(cursor: _Cursor, kind: ValueType) -> Field:
    if kind is not ValueType.STRING:
        return _check(cursor, Field(kind, None, bytes(cursor.take(SCALARS[kind].itemsize))))
    start = cursor.position
    cursor.take(cursor.number(8))
    return Field(kind, None, cursor.view[start : cursor.position])


def _check(cursor: _Cursor, field: Field) -> Field:
    """The field; GGUFError for a BOOL other than 0 or 1, an invalid byte of NumPy's bool."""
    if field.type is ValueType.BOOL and len(field.payload):
        largest = int(np.frombuffer(field.payload, np.uint8).max())
        if largest > 1:
            raise GGUFError(f"{cursor.where} has {largest} for a BOOL, wanted 0 or 1")
    return field


# -- tensors --------------------------------------------------------------------------------------


def _tensors(cursor: _Cursor, n_tensors: int, alignment: int) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    for i in range(n_tensors):
        cursor.where = f"tensor {i}"
        info = _info(cursor, alignment)
        if info.name in infos:
            raise GGUFError(f"tensor {i} is {brief(info.name)} again")
        infos[info.name] = info
    start = round_up(cursor.position, alignment)
    located = {
        name: TensorInfo(name, info.shape, info.dtype, start + info.offset, info.n_bytes)
        for name, info in infos.items()
    }
    _check_extents(located, len(cursor.view))
    return located


def _info(cursor: _Cursor, alignment: int) -> TensorInfo:
    """The next tensor's entry. Its offset counts from the start of the data, not of the file."""
    name = cursor.name()
    tensor = cursor.where = f"tensor {brief(name)}"
    n_dims = cursor.number(4)
    if not 1 <= n_dims <= MAX_DIMS:
        raise GGUFError(f"{tensor} has {n_dims} axes, wanted 1 to {MAX_DIMS}")
    shape = tuple(cursor.number(8) for _ in range(n_dims))[::-1]
    number, offset = cursor.number(4), cursor.number(8)
    dtype = BY_NUMBER.get(number)
    if dtype is None:
        raise GGUFError(f"{tensor} has type number {number}, which is not a known tensor type")
    fault = shape_fault(shape, dtype)
    if fault:
        raise GGUFError(f"{tensor} {fault}")
    if offset % alignment:
        raise GGUFError(f"{tensor} has offset {offset}, wanted a multiple of {alignment}")
    return TensorInfo(name, shape, dtype, offset, n_bytes(shape, dtype))


def _check_extents(tensors: Mapping[str, TensorInfo], n_file: int) -> None:
    for info in tensors.values():
        if info.offset + info.n_bytes > n_file:
            raise GGUFError(
                f"tensor {brief(info.name)} of shape {info.shape} needs bytes {info.offset} to"
                f" {info.offset + info.n_bytes}, but the file has {n_file}"
            )
    by_offset = sorted(tensors.values(), key=lambda info: info.offset)
    for before, after in pairwise(by_offset):
        if after.offset < before.offset + before.n_bytes:
            raise GGUFError(f"tensors {brief(before.name)} and {brief(after.name)} overlap")
