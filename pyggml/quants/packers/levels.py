"""Levels of packed blocks, x = offset + step · value(level), and the bits that hold them.

All of it is read off the decoder and the packer of a type. Bits of a block that change the whole
number of a weight are those of its level. Weights that share such bits are a unit, and the pattern
of a unit's bits is its code: 4 bits of one weight in Q4_K, 8 bits of five weights in TQ1_0.

A type has levels if each weight may take each of them, whatever the others take: not so where a
unit is a point of a grid (IQ3 and below), nor where a block also holds a sum of its levels (Q8_1).
Levels that no packer writes, such as −128 in Q8_0, are none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from pyggml.quants.base import NoPack, Pack, Quant
from pyggml.quants.layout import GROUP
from pyggml.quants.readers.arrays import ArrayBlock
from pyggml.quants.registry import quant

_MOST_BITS = 8  # of a unit
_N_BASES = 32  # random blocks in which each bit is turned
_N_PACKED = 8192  # weights that are packed to see all levels of a type


class _Numbers(ArrayBlock):
    """Blocks whose whole numbers, scales and minima are kept: `values`, `step` and `offset`, all
    float32 (n_blocks, block); and which bytes are read, bool (block_bytes,)."""

    def __init__(self, q: Quant, raw: np.ndarray) -> None:
        self.values, self.step, self.offset = np.zeros((3, len(raw), q.dtype.block), np.float32)
        self.is_read = np.zeros(q.dtype.block_bytes, bool)
        super().__init__(raw, np.empty_like(self.values))
        with np.errstate(all="ignore"):  # infinite and NaN scales are legal
            q.decode(self)

    def bytes(self, offset: int, n: int = GROUP) -> Any:
        self.is_read[offset : offset + n] = True
        return super().bytes(offset, n)

    def _put(self, scale: Any, q: Any, i: int) -> None:
        group = slice(i, i + GROUP)
        self.values[:, group], self.step[:, group] = q, scale
        if self.minima is not None:
            self.offset[:, group] = self._minima(i)


@dataclass(frozen=True, slots=True)
class _Units:
    """Units of as many bits and weights.

    bits      int (n_units, n_bits): positions in a block, the lowest bit of byte 0 is 0
    weights   int (n_units, n_weights)
    codes     uint8 (n_units, n_levels ** n_weights, n_bits): the bits of each choice of levels,
              that of the first weight counting 1, of the second n_levels, …
    """

    bits: np.ndarray
    weights: np.ndarray
    codes: np.ndarray


@dataclass(frozen=True, slots=True)
class Levels:
    """The levels of a type; values (n,) float32, ascending: what each stands for, times step and
    plus offset."""

    quant: Quant
    values: np.ndarray
    units: tuple[_Units, ...]

    @property
    def is_even(self) -> bool:
        """Whether each value is one more than the value before."""
        return bool((np.diff(self.values) == 1).all())

    def grid(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Offset and step, float32 (n_blocks, block) each, of every weight of the blocks."""
        numbers = _Numbers(self.quant, blocks)
        return numbers.offset, numbers.step

    def put(self, dst: np.ndarray, q: np.ndarray) -> None:
        """Write levels q, uint8 (n_blocks, block), into blocks uint8 (n_blocks, block_bytes)."""
        bits = np.unpackbits(dst, axis=1, bitorder="little")
        for units in self.units:
            choice = _choice(q[:, units.weights], len(self.values))
            bits[:, units.bits] = units.codes[np.arange(len(units.bits)), choice]
        dst[:] = np.packbits(bits, axis=1, bitorder="little")


def _choice(levels: np.ndarray, n: int) -> np.ndarray:
    """The number of a choice (…, n_weights) of levels below n."""
    return levels @ n ** np.arange(levels.shape[-1])


@cache
def levels_of(name: str) -> Levels | None:
    """The levels of this type; None if it has none. Raises QuantError for an unknown type."""
    q = quant(name)
    if q.dtype.block == 1 or isinstance(q.pack, NoPack):
        return None
    changes = _changes(q)
    if changes is None:
        return None
    shapes: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]] = {}
    for bits, weights in _parts(changes):
        if not 0 < len(bits) <= _MOST_BITS:
            return None
        shapes.setdefault((len(bits), len(weights)), []).append((bits, weights))
    values, units = _packed_values(q, q.pack), []
    for shape in shapes.values():
        bits, weights = map(np.array, zip(*shape, strict=True))
        codes = _codes(q, values, bits, weights)
        if codes is None:
            return None
        units.append(_Units(bits, weights, codes))
    return Levels(q, values, tuple(units))


def _changes(q: Quant) -> np.ndarray | None:
    """Whether a bit changes a weight's whole number, bool (n_bits, block); None if a block has
    bytes of other use, or such a bit changes a step or an offset too."""
    rng, n_bytes = np.random.default_rng(0), q.dtype.block_bytes
    single = np.packbits(np.eye(8 * n_bytes, dtype=np.uint8), axis=1, bitorder="little")
    changes, moves = np.zeros((2, 8 * n_bytes, q.dtype.block), bool)
    for base in rng.integers(0, 256, (_N_BASES, 1, n_bytes), np.uint8):
        one, each = _Numbers(q, base), _Numbers(q, base ^ single)
        changes |= one.values != each.values
        for scale in ("step", "offset"):
            moves |= getattr(one, scale).view(np.uint32) != getattr(each, scale).view(np.uint32)
    is_shared = (changes.any(axis=1) & moves.any(axis=1)).any()
    return changes if one.is_read.all() and not is_shared else None


def _parts(changes: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Bits and weights of each unit: the connected parts of bits (n_bits, block) that change
    weights."""
    linked = changes.T @ changes
    while ((wider := linked @ linked) != linked).any():
        linked = wider
    for part in np.unique(linked, axis=0):
        yield np.flatnonzero(changes[:, part].any(axis=1)), np.flatnonzero(part)


def _packed_values(q: Quant, pack: Pack) -> np.ndarray:
    """The whole numbers that the packer writes, ascending."""
    n = _N_PACKED // q.dtype.block
    src = np.random.default_rng(1).uniform(-1, 1, (n, q.dtype.block)).astype(np.float32)
    blocks = np.zeros((n, q.dtype.block_bytes), np.uint8)
    pack(blocks, src)
    return np.unique(_Numbers(q, blocks).values)


def _codes(
    q: Quant, values: np.ndarray, bits: np.ndarray, weights: np.ndarray
) -> np.ndarray | None:
    """`codes` of units with these bits and weights: of patterns for the same choice the first. None
    if a choice has no pattern."""
    (n_units, n_bits), n = bits.shape, len(values)
    numbers = np.arange(1 << n_bits, dtype=np.uint8)
    patterns = np.unpackbits(numbers[:, None], axis=1, bitorder="little", count=n_bits)
    blocks = np.zeros((len(patterns), 8 * q.dtype.block_bytes), np.uint8)
    blocks[:, bits] = patterns[:, None]
    of = _Numbers(q, np.packbits(blocks, axis=1, bitorder="little")).values[:, weights]
    level = np.minimum(np.searchsorted(values, of), n - 1)
    is_level, choice = (values[level] == of).all(axis=2), _choice(level, n)
    first = np.full((n_units, n ** weights.shape[1]), -1)
    for pattern in reversed(range(len(patterns))):
        units = np.flatnonzero(is_level[pattern])
        first[units, choice[pattern, units]] = pattern
    return None if (first < 0).any() else patterns[first]
