"""Decoders run in LLVM vectors: code for the block at an address.

Offsets are not checked here: `arrays` checks that a decoder stays within its block.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

from llvmlite import ir

from pyggml.jit import cgutils
from pyggml.jit.isa import CHOSEN
from pyggml.jit.llvm import (
    F32,
    I8,
    I16,
    I32,
    I64,
    at,
    broadcast,
    concatenate,
    every,
    from_f16,
    lookup16,
    shuffle,
    store,
    where_set,
)
from pyggml.quants.layout import GROUP, SUBGROUP, Block, ByteTable, Decoder

F32X8 = ir.VectorType(F32, 8)
F32X16 = ir.VectorType(F32, SUBGROUP)
_I8X32 = ir.VectorType(I8, GROUP)


def _vector(kind: Any, n: int) -> Any:
    """The LLVM type of n elements: a vector, or a scalar for n = 1."""
    return kind if n == 1 else ir.VectorType(kind, n)


def _count(value: Any) -> int:
    """How many elements a value has."""
    return value.type.count if isinstance(value.type, ir.VectorType) else 1


def _as_many(kind: Any, value: Any) -> Any:
    """The LLVM type of as many elements as a value has."""
    is_vector = isinstance(value.type, ir.VectorType)
    return ir.VectorType(kind, value.type.count) if is_vector else kind


def _constant(kind: Any, value: Any) -> Any:
    """A constant of a scalar type, or of a vector type with the value in every lane."""
    return every(kind, value) if isinstance(kind, ir.VectorType) else ir.Constant(kind, value)


def lane_of(builder: Any, numbers: Any, i: int) -> Any:
    """A lane of a vector; of widened bytes (see `fields`) the byte is taken, and widened alone."""
    if getattr(numbers, "opname", "") != "zext":
        return builder.extract_element(numbers, ir.Constant(I32, i))
    byte = builder.extract_element(numbers.operands[0], ir.Constant(I32, i))
    return builder.zext(byte, numbers.type.element)


def vector_of(lane: Any) -> Any:
    """The vector that `lane_of` took a lane of."""
    assert lane.opname == "extractelement", "a number that was computed by itself"
    return lane.operands[0]


def table_pointer(builder: Any, table: ByteTable) -> Any:
    """The bytes of a table, which lies in the module once."""
    module, name = builder.module, f"pyggml.table.{sha256(table.rows.tobytes()).hexdigest()[:16]}"
    rows = module.globals.get(name)
    if rows is None:
        raw = bytearray(table.rows)
        constant = ir.Constant(ir.ArrayType(I8, len(raw)), raw)
        rows = cgutils.global_constant(module, name, constant)
        rows.align = table.width
    return builder.bitcast(rows, I8.as_pointer())


class VectorBlock(Block):
    """The block at an address (an integer). Subclasses define the `add…` methods.

    Whole numbers stay GROUP bytes up to their last step: cheaper than wider integers.
    """

    def __init__(self, builder: Any, source: Any, size: int = GROUP) -> None:
        self.b, self.size = builder, size
        self._source = builder.inttoptr(source, I8.as_pointer())

    def _read(self, offset: int, kind: Any) -> Any:
        """A value of this LLVM type from byte `offset`."""
        pointer = self.b.gep(self._source, [ir.Constant(I64, offset)])
        value = self.b.load(self.b.bitcast(pointer, kind.as_pointer()))
        value.align = 1
        return value

    def bytes(self, offset: int, n: int = GROUP) -> Any:
        return self._read(offset, ir.VectorType(I8, n))

    def flags(self, offset: int, value: int) -> Any:
        return where_set(self.b, self._read(offset, I32), value)

    def pairs(self, offset: int) -> Any:
        """Each byte four times, each time another pair of its bits."""
        byte = self.bytes(offset, GROUP // 4)
        fours = shuffle(self.b, (i // 4 for i in range(GROUP)), byte)
        shifts = ir.Constant(_I8X32, [2 * (i % 4) for i in range(GROUP)])
        return self.b.and_(self.b.lshr(fours, shifts), every(_I8X32, 3))

    def fields(self, offset: int, n_bytes: int, n_bits: int, n: int | None = None) -> Any:
        if CHOSEN.neon and n_bits == 8 and n is None and n_bytes > 1:  # see lane_of
            return self.b.zext(self.bytes(offset, n_bytes), ir.VectorType(I32, n_bytes))
        if n_bytes > 4:
            halves = (self.fields(offset + at, 4, n_bits) for at in (0, 4))
            return self.join(*halves)
        word = self._read(offset, ir.IntType(8 * n_bytes))
        word = word if n_bytes == 4 else self.b.zext(word, I32)
        shifts = list(range(0, 8 * n_bytes, n_bits))[:n]
        kind = ir.VectorType(I32, len(shifts))
        shifted = self.b.lshr(broadcast(self.b, word, kind), ir.Constant(kind, shifts))
        return self.b.and_(shifted, every(kind, (1 << n_bits) - 1))

    def f16(self, offset: int, n: int = 1) -> Any:
        return self._from_f16(self._read(offset, _vector(I16, n)) if n > 1 else self._word(offset))

    def _word(self, offset: int) -> Any:
        """An int16, loaded so that LLVM does not fold the load into a conversion from float16: on
        x86 that would insert it into a register which happens to hold the sums of a row's product,
        and each block would wait for the one before."""
        pointer = self.b.gep(self._source, [ir.Constant(I64, offset)])
        return self.b.load_atomic(self.b.bitcast(pointer, I16.as_pointer()), "unordered", 2)

    def bf16(self, offset: int, n: int = 1) -> Any:
        words = _vector(I32, n)
        upper = self.b.zext(self._read(offset, _vector(I16, n)), words)
        return self.b.bitcast(self.b.shl(upper, _constant(words, 16)), _vector(F32, n))

    def f32(self, offset: int, n: int = 1) -> Any:
        return self._read(offset, _vector(F32, n))

    def half_e8m0(self, offset: int) -> Any:
        return self._half_power(self.b.zext(self._read(offset, I8), I32))

    def _half_power(self, e: Any) -> Any:
        """2^(e − 128) of an int or of each of several."""
        b, kind = self.b, e.type
        subnormal = b.shl(_constant(kind, 0x00200000), e)
        normal = b.shl(b.sub(e, _constant(kind, 1)), _constant(kind, 23))
        is_subnormal = b.icmp_unsigned("<", e, _constant(kind, 2))
        return b.bitcast(b.select(is_subnormal, subnormal, normal), _as_many(F32, e))

    def constant(self, value: float) -> Any:
        return ir.Constant(F32, value)

    def bits(self, whole: Any, first: int, n: int, to: int = 0) -> Any:
        b, kind, mask = self.b, whole.type, ((1 << n) - 1) << to
        if to < first:
            whole = b.lshr(whole, _constant(kind, first - to))
        elif to > first:
            whole = b.shl(whole, _constant(kind, to - first))
        return b.and_(whole, _constant(kind, mask))

    def either(self, a: Any, b: Any) -> Any:
        is_one_of_all = _count(a) > _count(b)
        return self.b.or_(a, broadcast(self.b, b, a.type) if is_one_of_all else b)

    def join(self, a: Any, b: Any) -> Any:
        return concatenate(self.b, [a, b])

    def minus(self, whole: Any, n: int) -> Any:
        return self.b.sub(whole, _constant(whole.type, n))

    def except_for(self, ints: Any, n: int) -> Any:
        is_n = self.b.icmp_signed("==", ints, every(ints.type, n))
        return self.b.select(is_n, every(ints.type, 0), ints)

    def digits(self, whole: Any, i: int) -> Any:
        """Fractions from a third on, and those from two thirds on, counted."""
        b, kind = self.b, whole.type
        fraction = b.mul(whole, every(kind, 3**i))
        third, two_thirds = (b.icmp_unsigned(">=", fraction, every(kind, n)) for n in (86, 171))
        return b.add(b.zext(third, kind), b.zext(two_thirds, kind))

    def negate(self, whole: Any, where: Any) -> Any:
        return self.b.sub(self.b.xor(whole, where), where)

    def lookup(self, nibbles: Any, table: Sequence[int]) -> Any:
        return lookup16(self.b, nibbles, table)

    def points(self, indices: Any, table: ByteTable) -> Any:
        b, kind = self.b, ir.VectorType(I8, table.width)
        rows = table_pointer(b, table)
        loads = []
        for i in range(GROUP // table.width):
            start = b.shl(b.zext(self.lane(indices, i), I64), I64(table.width.bit_length() - 1))
            load = b.load(b.bitcast(b.gep(rows, [start]), kind.as_pointer()))
            load.align = table.width
            loads.append(load)
        return concatenate(b, loads)

    def floats(self, whole: Any) -> Any:
        return self.b.sitofp(whole, _as_many(F32, whole))

    def half(self, ints: Any) -> Any:
        return self._from_f16(self.b.trunc(ints, _as_many(I16, ints)))

    def _from_f16(self, words: Any) -> Any:
        halves = self.b.bitcast(words, _as_many(ir.HalfType(), words))
        return from_f16(self.b, halves, _as_many(F32, words))

    def times(self, floats: Any, factor: Any) -> Any:
        n = _count(floats)
        return self.b.fmul(floats, factor if n == 1 else broadcast(self.b, factor, floats.type))

    def negative(self, floats: Any) -> Any:
        return self.b.fneg(floats)

    def lane(self, numbers: Any, i: int) -> Any:
        return lane_of(self.b, numbers, i)

    def subgroups(self, q: Any) -> list[Any]:
        """The first and the second SUBGROUP of GROUP bytes q, as floats."""
        halves = range(SUBGROUP), range(SUBGROUP, GROUP)
        return [self.floats(shuffle(self.b, half, q)) for half in halves]


class FloatsOut(VectorBlock):
    """Writes the weights as float32. scale·q is rounded before the minimum is added, as in ggml;
    for every type so far it is exact."""

    def __init__(self, builder: Any, source: Any, to: Any, size: int) -> None:
        super().__init__(builder, source, size)
        self._to, self._minima = to, None

    def add_minimum(self, minimum: Any) -> None:
        self._minima = broadcast(self.b, minimum, F32X8)

    def add_minima(self, minima: Any) -> None:
        self._minima = minima

    def add_two(self, scales: tuple[Any, Any], q: Any, i: int, most: int) -> None:
        for n, (scale, floats) in enumerate(zip(scales, self.subgroups(q), strict=True)):
            weights = self.times(floats, scale)
            if self._minima is not None:
                each = SUBGROUP * 16 // self._minima.type.count  # weights with one minimum
                minimum = self.lane(self._minima, (i + n * SUBGROUP) // each)
                weights = self.b.fadd(weights, broadcast(self.b, minimum, F32X16))
            self.add_floats(weights, i + n * SUBGROUP)

    def add_floats(self, floats: Any, i: int) -> None:
        store(self.b, floats, at(self.b, self._to, ir.Constant(I64, i)))


def emit_blocks(
    builder: Any, decoder: Decoder, n: Any, addresses: Sequence[Any], sizes: Sequence[int],
    block: Callable[..., Block],
) -> None:  # fmt: skip
    """A loop over n blocks: decoder(block(builder, *addresses)). Address k grows by sizes[k] bytes
    a block."""
    with cgutils.for_range(builder, n) as loop:
        here = (
            builder.add(base, builder.mul(loop.index, ir.Constant(I64, size)))
            for base, size in zip(addresses, sizes, strict=True)
        )
        decoder(block(builder, *here))
