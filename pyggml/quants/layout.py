"""The decoder of a weight type: the layout of its blocks, written once for every reader of blocks.

A decoder is a function of a `Block`. It reads bytes of the block, combines them to whole numbers q
and scales, and adds the weights in order (`add…`). The subclasses of `Block` decide what happens
(pyggml.quants.readers):

arrays         NumPy arrays over many blocks: the reference, and the only one without JIT
vectors        LLVM vectors; its subclasses unpack to float32, unpack to bytes for a tile
               (pyggml.kernels.gemm.int8_tile), or multiply (pyggml.kernels.gemm.dots)
pieces         LLVM vectors over neighbouring blocks, in any order of their weights
               (pyggml.kernels.gemm.int_dots)
lanes          LLVM vectors over the same block of several rows; its subclass multiplies
               (pyggml.kernels.gemm.lane_dots)
expressions    source code: device functions of CUDA, and WGSL

A decoder does not branch on values, so every read has a fixed offset.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

GROUP = 32  # weights in one `add`
SUBGROUP = 16  # the fewest weights with one scale or one minimum


@dataclass(frozen=True, eq=False)
class ByteTable:
    """Rows of `width` signed bytes, 4 or 8: points of a grid, or signs."""

    width: int
    make: Callable[[], np.ndarray]

    @cached_property
    def rows(self) -> np.ndarray:
        """int8 (n, width), made at their first use."""
        return np.ascontiguousarray(self.make(), np.int8).reshape(-1, self.width)


def _even_signs() -> np.ndarray:
    bits = np.unpackbits(np.arange(128, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    bits[:, 7] = bits.sum(axis=1) % 2
    return (255 * bits).view(np.int8)


# 255 for a minus sign: seven bits, and an eighth that makes the number of signs even. Devices whose
# tables are far away count the bits instead.
EVEN_SIGNS = ByteTable(8, _even_signs)


class Block(ABC):
    """The interface of a decoder. Its values are opaque, of three kinds:

    bytes    n numbers of 8 bits; unsigned in `bits`, signed in `add…` and `floats`
    ints     n numbers of 32 bits, signed
    floats   n float32; a single one is a scale, a minimum or a factor

    size     number of weights to add: those of the block; for plain types, any number
    """

    size: int

    # -- reading, from a byte offset -----------------------------------------------------------

    @abstractmethod
    def bytes(self, offset: int, n: int = GROUP) -> Any:
        """n bytes, a multiple of 4."""

    def nibbles(self, offset: int, n: int = SUBGROUP) -> Any:
        """2n bytes: the low 4 bits of n bytes, then their high 4 bits."""
        both = self.bytes(offset, n)
        return self.join(self.bits(both, 0, 4), self.bits(both, 4, 4))

    @abstractmethod
    def flags(self, offset: int, value: int) -> Any:
        """GROUP bytes: `value` where bit i of the 32 bits at `offset` is 1, else 0."""

    @abstractmethod
    def pairs(self, offset: int) -> Any:
        """GROUP bytes: the fields of 2 bits of 8 bytes, lowest bits first."""

    @abstractmethod
    def fields(self, offset: int, n_bytes: int, n_bits: int, n: int | None = None) -> Any:
        """The fields of n_bits of a word of 1, 2, 4 or 8 bytes, as ints, lowest bits first: all of
        them, or n. In 8 bytes none lies in both halves."""

    @abstractmethod
    def f16(self, offset: int, n: int = 1) -> Any:
        """n float16, as floats."""

    @abstractmethod
    def bf16(self, offset: int, n: int = 1) -> Any:
        """n bfloat16, as floats."""

    @abstractmethod
    def f32(self, offset: int, n: int = 1) -> Any:
        """n floats."""

    @abstractmethod
    def half_e8m0(self, offset: int) -> Any:
        """Half of an E8M0 scale: 2^(e − 128) for byte e, as a float; subnormal for e < 2."""

    @abstractmethod
    def constant(self, value: float) -> Any:
        """The same float in every block."""

    # -- arithmetic ----------------------------------------------------------------------------

    @abstractmethod
    def bits(self, whole: Any, first: int, n: int, to: int = 0) -> Any:
        """Bits first … first + n − 1 of bytes or ints, moved to bit `to`; all others 0."""

    @abstractmethod
    def either(self, a: Any, b: Any) -> Any:
        """Bitwise or, of bytes or ints; b may be one int for all of a."""

    @abstractmethod
    def join(self, a: Any, b: Any) -> Any:
        """The bytes, ints or floats of a, then the same number of b."""

    @abstractmethod
    def minus(self, whole: Any, n: int) -> Any:
        """Bytes or ints − n."""

    @abstractmethod
    def except_for(self, ints: Any, n: int) -> Any:
        """Ints, but 0 for n."""

    @abstractmethod
    def digits(self, whole: Any, i: int) -> Any:
        """Digit i in base 3, from 0 on, of bytes that are fractions: ⌊3 · frac(3^i · byte/256)⌋."""

    @abstractmethod
    def negate(self, whole: Any, where: Any) -> Any:
        """Bytes, negated where bytes of `where` are 255 and not where they are 0."""

    @abstractmethod
    def lookup(self, nibbles: Any, table: Sequence[int]) -> Any:
        """table[i] for GROUP bytes i below 16; the table has 16 signed bytes."""

    @abstractmethod
    def points(self, indices: Any, table: ByteTable) -> Any:
        """GROUP bytes: the rows that GROUP / width ints choose, one after the other."""

    @abstractmethod
    def floats(self, whole: Any) -> Any:
        """Bytes (signed) or ints as floats."""

    @abstractmethod
    def half(self, ints: Any) -> Any:
        """The float16 with these bits, as floats."""

    @abstractmethod
    def times(self, floats: Any, factor: Any) -> Any:
        """floats · factor, a single float."""

    @abstractmethod
    def negative(self, floats: Any) -> Any:
        """−floats."""

    @abstractmethod
    def lane(self, numbers: Any, i: int) -> Any:
        """Number i of several ints or floats."""

    # -- adding weights: scale·q, or scale·q + minimum; i is the index of the first --------------
    # Minima come before all weights.

    def add_minimum(self, minimum: Any) -> None:
        """The minimum of the first GROUP weights."""
        self.add_minima(minimum)

    @abstractmethod
    def add_minima(self, minima: Any) -> None:
        """The minima of 256 weights, floats: 8, one for each GROUP; with `add_two` alone also 16,
        one for each SUBGROUP."""

    def add(self, scale: Any, q: Any, i: int = 0) -> None:
        """GROUP weights: bytes q and one scale."""
        self.add_two((scale, scale), q, i, most=128)

    @abstractmethod
    def add_two(self, scales: tuple[Any, Any], q: Any, i: int, most: int) -> None:
        """GROUP weights: bytes q, a scale for the first SUBGROUP and one for the second; most: the
        largest |q|."""

    def add_floats(self, floats: Any, i: int) -> None:
        """Weights of a plain type."""
        raise TypeError(f"{type(self).__name__} takes whole numbers with scales, not floats")

    def pieces(self) -> Iterator[tuple[int, int]]:
        """(first, n) of the weights of a plain type, for each `add_floats`."""
        n = min(SUBGROUP, self.size)
        return ((i, n) for i in range(0, self.size, n))


Decoder = Callable[[Block], None]
