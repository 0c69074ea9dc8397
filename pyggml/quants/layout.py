"""The decoder of a weight type: what lies in a block, written once for all that read blocks.

A decoder is a function of a `Block`. It reads bytes of the block, combines them to whole numbers q
and scales, and tells the block its weights in order. Several kinds of `Block` run it:

pyggml.quants.arrays    NumPy arrays over many blocks: the reference, and all there is without JIT
pyggml.quants.vectors   LLVM vectors; its subclasses unpack to float32, unpack to bytes for a tile
                        (pyggml.gemm.int8_tile), or multiply (pyggml.gemm.dots)

A decoder never asks what a number is, so each read is at a fixed place of the block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

GROUP = 32  # weights that are told at a time; those of a block that share a minimum
SUBGROUP = 16  # the fewest weights that share a scale


class Block(ABC):
    """What a decoder sees. Values are opaque to it, of three kinds:

    bytes    n numbers of 8 bits: unsigned to `bits`, signed once they are weights or floats
    ints     n numbers of 32 bits, signed
    floats   n float32; a single one is a scale, a minimum or a factor

    size     weights to be told: those of the block, for plain types any number
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
    def bits(self, whole: Any, low: int, n: int, to: int = 0) -> Any:
        """Bits low … low + n − 1 of bytes or ints, moved to bit `to`; all others 0."""

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
        """table[i] of GROUP bytes i below 16; a table has 16 signed bytes."""

    @abstractmethod
    def floats(self, whole: Any) -> Any:
        """Bytes (signed) or ints as floats."""

    @abstractmethod
    def times(self, floats: Any, factor: Any) -> Any:
        """floats · one float."""

    @abstractmethod
    def negative(self, floats: Any) -> Any:
        """−floats."""

    @abstractmethod
    def lane(self, floats: Any, i: int) -> Any:
        """Float number i of several."""

    # -- telling the weights: scale·q, or scale·q + minimum; i is the first one's number ---------
    # Minima are told before any weight.

    @abstractmethod
    def add_minimum(self, minimum: Any) -> None:
        """The minimum of the first GROUP weights."""

    @abstractmethod
    def add_minima(self, minima: Any) -> None:
        """The minima of 8 times GROUP weights, from the first on."""

    @abstractmethod
    def add(self, scale: Any, q: Any, i: int = 0) -> None:
        """GROUP weights with q in bytes and one scale."""

    @abstractmethod
    def add_two(self, scales: tuple[Any, Any], q: Any, i: int) -> None:
        """GROUP weights with one scale for the first SUBGROUP and one for the second."""

    def add_floats(self, floats: Any, i: int) -> None:
        """Weights of a plain type."""
        raise TypeError(f"{type(self).__name__} takes whole numbers with scales, not floats")

    def pieces(self) -> Iterator[tuple[int, int]]:
        """First and number of the weights of a plain type that are told at a time."""
        n = min(SUBGROUP, self.size)
        return ((i, n) for i in range(0, self.size, n))


Decoder = Callable[[Block], None]
