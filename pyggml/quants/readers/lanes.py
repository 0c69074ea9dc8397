"""Decoders run in lanes: the same block of LANES neighbouring rows at once, a row in each lane.

What VectorBlock does with the numbers of one block side by side is done here with the rows of a
matrix side by side. So a scale is a vector, as good as a weight, and no sum crosses lanes.

A value is a tuple of LLVM vectors of LANES words of 32 bits: of bytes, four to a word; of ints or
floats, one to a word. A single float is a tuple of one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from pyggml.jit.isa import CHOSEN
from pyggml.jit.llvm import F32, I8, I32, I64, concatenate, every, prefetch, shuffle
from pyggml.quants.layout import GROUP, ByteTable
from pyggml.quants.readers.vectors import VectorBlock, table_pointer

LANES = CHOSEN.lanes
LOAD = 16  # bytes of a row that are read at once: the fewest of a block
WORD = 4  # bytes
BYTES = ir.VectorType(I8, WORD * LANES)
INTS = ir.VectorType(I32, LANES)
FLOATS = ir.VectorType(F32, LANES)
_LINE = 64  # bytes of a cache line

Lanes = tuple[Any, ...]


def _each(verb: Callable[..., Any]) -> Callable[..., Lanes]:
    """A verb of vectors, for each of a value's."""

    def of_lanes(block: Any, value: Lanes, *settings: Any, **more: Any) -> Lanes:
        return tuple(verb(block, v, *settings, **more) for v in value)

    return of_lanes


class LaneBlock(VectorBlock):
    """The blocks at an address and `step` bytes apart, integers. Subclasses define `add…`."""

    def __init__(self, builder: Any, source: Any, step: Any, n_bytes: int) -> None:
        """n_bytes: of a block. The same blocks of the next LANES rows are prefetched."""
        self.b, self.size, self.n_bytes = builder, GROUP, n_bytes
        self._loads: dict[int, Lanes] = {}
        starts = (builder.add(source, self._times(step, 4 * quad)) for quad in range(LANES // 4))
        self._rows = [
            builder.add(start, self._times(step, i)) for start in starts for i in range(4)
        ]
        far = self._times(step, LANES)
        for row in self._rows:
            for line in range(0, n_bytes, _LINE):
                prefetch(builder, self._pointer(builder.add(row, far), line, I8))

    def _times(self, step: Any, n: int) -> Any:
        return self.b.mul(step, ir.Constant(I64, n))

    # -- reading ---------------------------------------------------------------------------------

    def _pointer(self, row: Any, offset: int, kind: Any) -> Any:
        here = self.b.inttoptr(row, I8.as_pointer())
        here = self.b.gep(here, [ir.Constant(I64, offset)])
        return self.b.bitcast(here, kind.as_pointer())

    def _load(self, offset: int) -> Lanes:
        """The four words of LOAD bytes from `offset` on."""
        if offset not in self._loads:
            four = ir.VectorType(I32, 4)
            pieces = [self.b.load(self._pointer(row, offset, four)) for row in self._rows]
            for piece in pieces:
                piece.align = 1
            self._loads[offset] = self._transpose(
                [concatenate(self.b, pieces[i::4]) for i in range(4)]
            )
        return self._loads[offset]

    def _transpose(self, rows: list[Any]) -> Lanes:
        """Each four neighbouring words of four vectors, a 4 × 4 matrix, transposed."""
        a, b, c, d = rows
        pairs = zip(self._interleave(a, b, 1), self._interleave(c, d, 1), strict=True)
        return tuple(row for pair in pairs for row in self._interleave(*pair, 2))

    def _interleave(self, one: Any, other: Any, n: int) -> Lanes:
        """Of each four words of two vectors the lower halves and the upper, n words in turns."""
        order = np.arange(4).reshape(2, -1, n)  # (half, turn, n)
        orders = np.concatenate([order, order + LANES], axis=2).reshape(2, 4)
        quads = 4 * np.arange(LANES // 4)[:, None]
        return tuple(shuffle(self.b, (quads + order).ravel(), one, other) for order in orders)

    def _ints(self, offset: int, n_bytes: int) -> Any:
        """n_bytes, at most a word, as ints; of a load that neighbours share, if they fill it."""
        start = offset // LOAD * LOAD
        if offset % WORD + n_bytes > WORD or start + LOAD > self.n_bytes:
            start = min(offset, self.n_bytes - LOAD)
        if (offset - start) % WORD + n_bytes > WORD:
            start -= WORD - (offset - start) % WORD  # an earlier load, in which they fill a word
        which, byte = divmod(offset - start, WORD)
        word = self._load(start)[which]
        if byte:
            word = self.b.lshr(word, every(INTS, 8 * byte))
        return self.b.and_(word, every(INTS, (1 << 8 * n_bytes) - 1)) if n_bytes < WORD else word

    def bytes(self, offset: int, n: int = GROUP) -> Lanes:
        if n % LOAD:
            words = (self._ints(at, WORD) for at in range(offset, offset + n, WORD))
            return tuple(self.b.bitcast(word, BYTES) for word in words)
        loads = (self._load(start) for start in range(offset, offset + n, LOAD))
        return tuple(self.b.bitcast(word, BYTES) for load in loads for word in load)

    def flags(self, offset: int, value: int) -> Lanes:
        """A product moves each of four bits to the lowest of a byte of its own."""
        word, masks = self._ints(offset, WORD), []
        for first in range(0, GROUP, WORD):
            four = self.b.and_(self.b.lshr(word, every(INTS, first)), every(INTS, 15))
            apart = self.b.mul(four, every(INTS, 0x00204081))
            ones = self.b.and_(apart, every(INTS, 0x01010101))
            masks.append(self.b.bitcast(self.b.mul(ones, every(INTS, value)), BYTES))
        return tuple(masks)

    def pairs(self, offset: int) -> Lanes:
        """Each byte becomes a word: its halves are parted, and the halves of these."""
        b, words = self.b, []
        for first in range(0, GROUP // 4, WORD):
            word = self._ints(offset + first, WORD)
            for byte in range(WORD):
                four = b.and_(b.lshr(word, every(INTS, 8 * byte)), every(INTS, 255))
                apart = b.or_(four, b.shl(four, every(INTS, 6)))
                apart = b.or_(apart, b.shl(apart, every(INTS, 12)))
                words.append(b.bitcast(b.and_(apart, every(INTS, 0x03030303)), BYTES))
        return tuple(words)

    def fields(self, offset: int, n_bytes: int, n_bits: int, n: int | None = None) -> Lanes:
        if n_bytes > WORD:
            return self.fields(offset, WORD, n_bits) + self.fields(offset + WORD, WORD, n_bits)
        word, mask = self._ints(offset, n_bytes), every(INTS, (1 << n_bits) - 1)
        shifts = range(0, 8 * n_bytes, n_bits)[:n]
        return tuple(self.b.and_(self.b.lshr(word, every(INTS, at)), mask) for at in shifts)

    def f16(self, offset: int, n: int = 1) -> Lanes:
        return self.half(tuple(self._ints(offset + 2 * i, 2) for i in range(n)))

    def bf16(self, offset: int, n: int = 1) -> Lanes:
        words = (self._ints(offset + 2 * i, 2) for i in range(n))
        return tuple(self.b.bitcast(self.b.shl(word, every(INTS, 16)), FLOATS) for word in words)

    def f32(self, offset: int, n: int = 1) -> Lanes:
        words = (self._ints(offset + WORD * i, WORD) for i in range(n))
        return tuple(self.b.bitcast(word, FLOATS) for word in words)

    def half_e8m0(self, offset: int) -> Lanes:
        return (self._half_power(self._ints(offset, 1)),)

    def constant(self, value: float) -> Lanes:
        return (every(FLOATS, value),)

    # -- arithmetic ------------------------------------------------------------------------------

    bits = _each(VectorBlock.bits)
    minus = _each(VectorBlock.minus)
    except_for = _each(VectorBlock.except_for)
    digits = _each(VectorBlock.digits)
    lookup = _each(VectorBlock.lookup)
    half = _each(VectorBlock.half)
    negative = _each(VectorBlock.negative)

    def negate(self, whole: Lanes, where: Lanes) -> Lanes:
        return tuple(map(super().negate, whole, where))

    def either(self, a: Lanes, b: Lanes) -> Lanes:
        return tuple(map(super().either, a, b * len(a) if len(b) == 1 else b))

    def join(self, a: Lanes, b: Lanes) -> Lanes:
        return a + b

    def points(self, indices: Lanes, table: ByteTable) -> Lanes:
        """Row by row of the matrix, its row of the table."""
        b, rows = self.b, table_pointer(self.b, table)
        words = []
        for index in indices:
            parts = [every(INTS, 0)] * (table.width // WORD)
            for lane in range(LANES):
                here = b.zext(b.extract_element(index, ir.Constant(I32, lane)), I64)
                point = b.gep(rows, [b.mul(here, ir.Constant(I64, table.width))])
                for n, part in enumerate(parts):
                    word = b.gep(point, [ir.Constant(I64, n * WORD)])
                    word = b.load(b.bitcast(word, I32.as_pointer()))
                    parts[n] = b.insert_element(part, word, ir.Constant(I32, lane))
            words += [b.bitcast(part, BYTES) for part in parts]
        return tuple(words)

    def floats(self, whole: Lanes) -> Lanes:
        ints = self._widen(whole) if whole[0].type == BYTES else whole
        return tuple(self.b.sitofp(v, FLOATS) for v in ints)

    def _widen(self, whole: Lanes) -> Lanes:
        """Bytes (signed) as ints: each of a word's four goes to its top and down again."""
        words = [self.b.bitcast(v, INTS) for v in whole]
        tops = [self.b.shl(v, every(INTS, up)) for v in words for up in (24, 16, 8, 0)]
        return tuple(self.b.ashr(v, every(INTS, 24)) for v in tops)

    def times(self, floats: Lanes, factor: Lanes) -> Lanes:
        return tuple(self.b.fmul(v, factor[0]) for v in floats)

    def lane(self, numbers: Lanes, i: int) -> Lanes:
        return (numbers[i],)
