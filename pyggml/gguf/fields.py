"""A metadata value: its type and its bytes in the file.

scalar   one little-endian number; a BOOL is one byte, 0 or 1
STRING   n u64, then n bytes, usually but not always UTF-8
array    element type u32, n u64 (both kept in the Field), then n scalars or n STRINGs
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import Any, overload

import numpy as np

from pyggml.errors import GGUFError

_U64 = struct.Struct("<Q")


class ValueType(IntEnum):
    """enum gguf_type."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


SCALARS: dict[ValueType, np.dtype] = {
    ValueType.UINT8: np.dtype("<u1"),
    ValueType.INT8: np.dtype("<i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype(np.bool_),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}
_OF_DTYPE = {dtype: kind for kind, dtype in SCALARS.items()}


def brief(text: object) -> str:
    """A text from a file for an error message: quoted, escaped and shortened."""
    quoted = repr(text)
    return quoted if len(quoted) <= 80 else f"{quoted[:60]}... ({len(quoted)} characters)"


def string_bounds(buffer: memoryview, n: int) -> np.ndarray:
    """Bounds (n + 1,) int64 of n strings: string i is buffer[bounds[i] + 8 : bounds[i + 1]].

    The only Python loop over strings; 300,000 take 0.1 s. GGUFError if the buffer ends early.
    """
    unpack, position, end = _U64.unpack_from, 0, len(buffer)
    bounds = array("q", [0])
    try:
        for _ in range(n):
            (length,) = unpack(buffer, position)
            position += 8 + length
            if position > end:
                raise GGUFError(f"a string claims {length} bytes, but {end} remain for all of them")
            bounds.append(position)
    except struct.error:
        raise GGUFError(f"{n} strings are claimed and {len(bounds) - 1} are there") from None
    return np.frombuffer(bounds, np.int64)


class StringArray(Sequence[str]):
    """Strings of a file, decoded on access. Invalid UTF-8 becomes U+FFFD; `raw` is unchanged."""

    __slots__ = ("_bounds", "_payload")

    def __init__(self, payload: bytes | memoryview, bounds: np.ndarray) -> None:
        self._payload, self._bounds = payload, bounds

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.raw(index).decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        return (raw.decode("utf-8", "replace") for raw in self.raw_list())

    def raw(self, index: int) -> bytes:
        """The bytes of one string."""
        i = range(len(self))[index]
        return bytes(self._payload[self._bounds[i] + 8 : self._bounds[i + 1]])

    def raw_list(self) -> list[bytes]:
        """The bytes of all strings; much faster than `raw` for each."""
        whole, bounds = bytes(self._payload), self._bounds.tolist()
        return [whole[a + 8 : b] for a, b in pairwise(bounds)]

    def __repr__(self) -> str:
        return f"<StringArray of {len(self)}>"


Value = bool | int | float | str | np.ndarray | StringArray


@dataclass(frozen=True, slots=True)
class Field:
    """One metadata value.

    type      type of the value, or of an array's elements
    n         elements of an array; None for a single value
    payload   the value's bytes in the file, after its type (and an array's element type and n); a
              Field that was read is written unchanged
    bounds    of an array of strings, see `string_bounds`
    """

    type: ValueType
    n: int | None
    payload: bytes | memoryview = field(repr=False)
    bounds: np.ndarray | None = field(default=None, repr=False, compare=False)

    @property
    def kind(self) -> str:
        """The type in words, such as "UINT32" or "array of 5 STRING"."""
        return self.type.name if self.n is None else f"array of {self.n} {self.type.name}"

    @property
    def value(self) -> Value:
        """The value as plain Python. Arrays are read-only: a view of the file, or a copy if the
        file has them unaligned."""
        if self.bounds is not None:
            return StringArray(self.payload, self.bounds)
        if self.type is ValueType.STRING:
            return self.raw.decode("utf-8", "replace")
        numbers = np.frombuffer(self.payload, SCALARS[self.type])
        if self.n is None:
            number: bool | int | float = numbers.item()
            return number
        if not numbers.flags.aligned:  # Numba compiles anew for unaligned arrays
            numbers = numbers.copy()
            numbers.flags.writeable = False
        return numbers

    @property
    def raw(self) -> bytes:
        """The bytes of a single STRING. GGUFError for other values."""
        if self.type is not ValueType.STRING or self.n is not None:
            raise GGUFError(f"a metadata value is {self.kind}, wanted STRING")
        return bytes(self.payload[8:])

    @classmethod
    def of(cls, value: Any) -> Field:
        """The Field for a Python or NumPy value.

        bool → BOOL, int → UINT32 (INT32 if negative, 64 bits if large), float → FLOAT32,
        str or bytes → STRING, a list of those or a StringArray → array of STRING; a NumPy number
        or 1-D array by its dtype. GGUFError for anything else.
        """
        if isinstance(value, Field):
            return value
        if isinstance(value, str | bytes):
            return cls(ValueType.STRING, None, string(value))
        if isinstance(value, StringArray):
            return _strings(value.raw_list())
        if isinstance(value, list | tuple):
            return _strings(value)
        return _numbers(
            value if isinstance(value, np.generic | np.ndarray) else _sized_scalar(value)
        )


def _sized_scalar(value: Any) -> np.generic:
    """A Python number as a NumPy number of its type in the file."""
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            single = np.float32(value)
        if np.isinf(single) and not np.isinf(value):
            raise GGUFError(f"the number {value} is too large for FLOAT32; pass a np.float64")
        return single
    if isinstance(value, int):
        for dtype in (np.uint32, np.int32, np.uint64, np.int64):
            if np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
                return dtype(value)
        raise GGUFError("an integer needs more than 64 bits, which GGUF does not have")
    raise GGUFError(f"a {type(value).__name__} cannot be a metadata value: {brief(value)}")


def _numbers(value: np.generic | np.ndarray) -> Field:
    if value.ndim > 1:
        raise GGUFError(f"a metadata array has {value.ndim} axes, wanted 1")
    kind = _OF_DTYPE.get(value.dtype)
    if kind is None:
        raise GGUFError(f"GGUF metadata has no type for NumPy's {value.dtype}")
    return Field(kind, value.size if value.ndim else None, value.tobytes())


def string(text: str | bytes) -> bytes:
    """A string's bytes in the file: length u64, then UTF-8. GGUFError for half a surrogate pair."""
    try:
        data = text.encode() if isinstance(text, str) else text
    except UnicodeEncodeError:
        raise GGUFError(f"the text {brief(text)} holds half of a surrogate pair") from None
    return _U64.pack(len(data)) + data


def _strings(texts: Sequence[Any]) -> Field:
    wrong = {type(t).__name__ for t in texts if not isinstance(t, str | bytes)}
    if wrong:
        raise GGUFError(
            f"a list in metadata holds {', '.join(sorted(wrong))}, wanted only str;"
            " numbers go in a NumPy array, which says their type"
        )
    parts = [string(t) for t in texts]
    bounds = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(p) for p in parts], out=bounds[1:])
    return Field(ValueType.STRING, len(parts), b"".join(parts), bounds)
