"""The decoder of a weight type: the layout of its blocks, written once for every reader of blocks.

A decoder is a function of a `Block`. It reads bytes of the block, combines them to whole numbers q
and scales, and adds the weights in order (`add…`). The subclasses of `Block` decide what happens:

pyggml.quants.readers.arrays    NumPy arrays over many blocks: the reference, and the only one without JIT
pyggml.quants.readers.vectors   LLVM vectors; its subclasses unpack to float32, unpack to bytes for a tile
                        (pyggml.kernels.gemm.int8_tile), or multiply (pyggml.kernels.gemm.dots)
pyggml.quants.readers.lanes     LLVM vectors over the same block of several rows; its subclass multiplies
                        (pyggml.kernels.gemm.lane_dots)

A decoder does not branch on values, so every read has a fixed offset.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

GROUP = 32  # weights in one `add`; they share a minimum
SUBGROUP = 16  # the fewest weights with one scale


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
        """n bytes."""

    @abstractmethod
    def nibbles(self, offset: int) -> Any:
        """GROUP bytes: the low 4 bits of 16 bytes, then their high 4 bits."""

    @abstractmethod
    def flags(self, offset: int, value: int) -> Any:
        """GROUP bytes: `value` where bit i of the 32 bits at `offset` is 1, else 0."""

    @abstractmethod
    def fields(self, offset: int, n_bytes: int, n_bits: int) -> Any:
        """The n-bit fields of a word of 2 or 4 bytes, as ints, lowest bits first."""

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

    # -- arithmetic ----------------------------------------------------------------------------

    @abstractmethod
    def bits(self, whole: Any, first: int, n: int, to: int = 0) -> Any:
        """Bits first … first + n − 1 of bytes or ints, moved to bit `to`; all others 0."""

    @abstractmethod
    def either(self, a: Any, b: Any) -> Any:
        """Bitwise or, of bytes or ints."""

    @abstractmethod
    def join(self, a: Any, b: Any) -> Any:
        """The bytes of a, then the same number of bytes of b."""

    @abstractmethod
    def minus(self, whole: Any, n: int) -> Any:
        """Bytes or ints − n."""

    @abstractmethod
    def lookup(self, nibbles: Any, table: Sequence[int]) -> Any:
        """table[i] for GROUP bytes i below 16; the table has 16 signed bytes."""

    @abstractmethod
    def floats(self, whole: Any) -> Any:
        """Bytes (signed) or ints as floats."""

    @abstractmethod
    def times(self, floats: Any, factor: Any) -> Any:
        """floats · factor, a single float."""

    @abstractmethod
    def negative(self, floats: Any) -> Any:
        """−floats."""

    @abstractmethod
    def lane(self, floats: Any, i: int) -> Any:
        """Float number i of several."""

    # -- adding weights: scale·q, or scale·q + minimum; i is the index of the first --------------
    # Minima come before all weights.

    @abstractmethod
    def add_minimum(self, minimum: Any) -> None:
        """The minimum of the first GROUP weights."""

    @abstractmethod
    def add_minima(self, minima: Any) -> None:
        """The minima of 8 · GROUP weights, floats (8,)."""

    @abstractmethod
    def add(self, scale: Any, q: Any, i: int = 0) -> None:
        """GROUP weights: bytes q and one scale."""

    @abstractmethod
    def add_two(self, scales: tuple[Any, Any], q: Any, i: int) -> None:
        """GROUP weights: bytes q, a scale for the first SUBGROUP and one for the second."""

    def add_floats(self, floats: Any, i: int) -> None:
        """Weights of a plain type."""
        raise TypeError(f"{type(self).__name__} takes whole numbers with scales, not floats")

    def pieces(self) -> Iterator[tuple[int, int]]:
        """(first, n) of the weights of a plain type, for each `add_floats`."""
        n = min(SUBGROUP, self.size)
        return ((i, n) for i in range(0, self.size, n))


Decoder = Callable[[Block], None]
