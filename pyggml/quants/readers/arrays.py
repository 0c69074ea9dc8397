"""Decoders run on NumPy arrays, over many blocks at once: the reference for compiled unpackers.

Values are arrays (n_blocks, n): bytes uint8, ints int32, floats float32. A single float has n = 1.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pyggml.graph.dtypes import DType
from pyggml.quants.layout import GROUP, SUBGROUP, Block, ByteTable, Decoder


class ArrayBlock(Block):
    """Unpacks blocks `raw`, uint8 (n_blocks, block_bytes), to `out`, float32 (n_blocks, block).

    Raises IndexError for a read beyond the block. Offsets do not depend on the bytes, so a check of
    one block holds for all blocks and for every subclass of `Block`.
    """

    def __init__(self, raw: np.ndarray, out: np.ndarray) -> None:
        self._raw, self._out = raw, out
        self.size = out.shape[1]
        self.minima: Any = None  # float32 (n_blocks, 1, 8 or 16)
        self.is_plain = False  # whether the weights were added as floats

    def bytes(self, offset: int, n: int = GROUP) -> Any:
        if offset + n > self._raw.shape[1]:
            raise IndexError(
                f"a decoder reads bytes {offset} to {offset + n - 1} of a block of "
                f"{self._raw.shape[1]}"
            )
        return self._raw[:, offset : offset + n]

    def _numbers(self, offset: int, n: int, kind: str) -> Any:
        """n little-endian numbers of a NumPy type."""
        raw = self.bytes(offset, n * np.dtype(kind).itemsize)
        return np.ascontiguousarray(raw).view(kind)

    def flags(self, offset: int, value: int) -> Any:
        bits = np.unpackbits(self.bytes(offset, GROUP // 8), axis=1, bitorder="little")
        return bits * np.uint8(value)

    def pairs(self, offset: int) -> Any:
        return self.fields(offset, 8, 2).astype(np.uint8)

    def fields(self, offset: int, n_bytes: int, n_bits: int, n: int | None = None) -> Any:
        word = self._numbers(offset, 1, f"<u{n_bytes}").astype(np.uint64)
        shifts = np.arange(0, 8 * n_bytes, n_bits, dtype=np.uint64)[:n]
        return ((word >> shifts) & np.uint64((1 << n_bits) - 1)).astype(np.int32)

    def f16(self, offset: int, n: int = 1) -> Any:
        return self._numbers(offset, n, "<f2").astype(np.float32)

    def bf16(self, offset: int, n: int = 1) -> Any:
        return (self._numbers(offset, n, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)

    def f32(self, offset: int, n: int = 1) -> Any:
        return self._numbers(offset, n, "<f4")

    def half_e8m0(self, offset: int) -> Any:
        return np.ldexp(np.float32(1), self.bytes(offset, 1).astype(np.int32) - 128)

    def constant(self, value: float) -> Any:
        return np.full((len(self._raw), 1), value, np.float32)

    def bits(self, whole: Any, first: int, n: int, to: int = 0) -> Any:
        kind = whole.dtype.type
        return ((whole >> kind(first)) & kind((1 << n) - 1)) << kind(to)

    def either(self, a: Any, b: Any) -> Any:
        return a | b

    def join(self, a: Any, b: Any) -> Any:
        return np.concatenate([a, b], axis=1)

    def minus(self, whole: Any, n: int) -> Any:
        return whole - whole.dtype.type(n)

    def except_for(self, ints: Any, n: int) -> Any:
        return np.where(ints == n, np.int32(0), ints)

    def digits(self, whole: Any, i: int) -> Any:
        fraction = whole * np.uint8(3**i)
        return ((fraction.astype(np.uint16) * np.uint16(3)) >> np.uint16(8)).astype(np.uint8)

    def negate(self, whole: Any, where: Any) -> Any:
        return (whole ^ where) - where

    def lookup(self, nibbles: Any, table: Sequence[int]) -> Any:
        return np.array(table, np.int8).view(np.uint8)[nibbles]

    def points(self, indices: Any, table: ByteTable) -> Any:
        return table.rows.view(np.uint8)[indices].reshape(len(indices), GROUP)

    def floats(self, whole: Any) -> Any:
        signed = np.ascontiguousarray(whole).view(np.int8) if whole.dtype == np.uint8 else whole
        return signed.astype(np.float32)

    def half(self, ints: Any) -> Any:
        return ints.astype(np.uint16).view(np.float16).astype(np.float32)

    def times(self, floats: Any, factor: Any) -> Any:
        return floats * factor

    def negative(self, floats: Any) -> Any:
        return -floats

    def lane(self, numbers: Any, i: int) -> Any:
        return numbers[:, i : i + 1]

    def add_minima(self, minima: Any) -> None:
        self.minima = minima

    def add_two(self, scales: tuple[Any, Any], q: Any, i: int, most: int) -> None:
        self._put(np.repeat(self.join(*scales), SUBGROUP, axis=1), self.floats(q), i)

    def _put(self, scale: Any, q: Any, i: int) -> None:
        """GROUP weights: floats, a scale and a q for each."""
        weights = scale * q
        self._out[:, i : i + GROUP] = weights if self.minima is None else weights + self._minima(i)

    def _minima(self, i: int) -> Any:
        """The minima of GROUP weights."""
        each = self.size // self.minima.shape[1]  # weights with one minimum
        minima = self.minima[:, i // each : max(i + GROUP, each) // each]
        return np.repeat(minima, GROUP // minima.shape[1], axis=1)

    def add_floats(self, floats: Any, i: int) -> None:
        self._out.view(np.uint32)[:, i : i + floats.shape[1]] = floats.view(np.uint32)
        self.is_plain = True


def decode(decoder: Decoder, raw: np.ndarray, out: np.ndarray) -> ArrayBlock:
    """Unpack `raw` to `out`, as ArrayBlock; returns the ArrayBlock."""
    block = ArrayBlock(raw, out)
    with np.errstate(all="ignore"):  # infinite and NaN scales are legal
        decoder(block)
    return block


def observe(decoder: Decoder, dtype: DType) -> ArrayBlock:
    """A block of zeros after its decoder: whether a type has minima, or is plain, is the same for
    all bytes."""
    raw, out = np.zeros((1, dtype.block_bytes), np.uint8), np.zeros((1, dtype.block), np.float32)
    return decode(decoder, raw, out)
