"""x in bytes, in the order in which a type's rows are multiplied (pyggml.kernels.gemm.row_plan).

Packed x holds for each unit of n weights and each token: n bytes in the weights' order; floats, one
for each scale of the weights: x's scale, by the factor of the weights; if zero is not 0, as many of
−zero · scale · Σ q; and if the type has minima, scale · Σ q of whatever has one. Scales and bytes
are those of pyggml.kernels.gemm.activations, one scale for 32 numbers.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from pyggml.graph.dtypes import dtype
from pyggml.jit import cgutils, instruction, types
from pyggml.jit.llvm import (
    F32,
    I8,
    I32,
    I64,
    at,
    by_quads,
    concatenate,
    every,
    load,
    shuffle,
    totals,
)
from pyggml.kernels.gemm.activations import largest, round_product, scale_of
from pyggml.kernels.gemm.row_plan import UNIT, RowPlan, plan, units
from pyggml.quants.layout import GROUP, SUBGROUP
from pyggml.quants.readers.vectors import F32X16
from pyggml.quants.unpack import WHOLE_TYPES
from pyggml.sizes import round_up

_LINE = 64  # bytes
_FLOAT = 4


class Unit(NamedTuple):
    """A unit of packed x: its plan, n weights; where its terms are, in bytes."""

    plan: RowPlan
    n: int
    n_scales: int
    zeros: int
    minima: int
    size: int


@lru_cache
def unit_of(name: str, n_blocks: int) -> Unit:
    """The unit of so many blocks of a type."""
    p, n = plan(name, n_blocks), n_blocks * dtype(name).block
    n_scales = n // GROUP * p.of_group
    zeros = n + _FLOAT * n_scales
    minima = zeros + _FLOAT * n_scales * (p.zero != 0)
    return Unit(p, n, n_scales, zeros, minima, round_up(minima + _FLOAT * p.n_minima, _LINE))


def packed_bytes(name: str, depth: int) -> int:
    """Bytes of a packed token."""
    return sum(unit_of(name, n_blocks).size * n for n_blocks, n in units(dtype(name), depth))


def counts(b: Any, name: str, depth: Any) -> list[tuple[int, Any]]:
    """(blocks of a unit, units of that size) of a row, one size after the other."""
    block = dtype(name).block
    most = max(1, UNIT // block)
    whole = most, b.udiv(depth, I64(most * block))
    left = 1, b.udiv(b.urem(depth, I64(most * block)), I64(block))
    return [whole] if most == 1 else [whole, left]


@instruction(types.void(*(types.intp,) * 4), n_constants=2)
def pack_token(b: Any, kind: int, n_tokens: int, to: Any, token: Any, x: Any, depth: Any) -> None:
    """x of token number `token`, `depth` numbers, to packed x of n_tokens; addresses. kind: of
    WHOLE_TYPES; it and n_tokens are constants."""
    name = WHOLE_TYPES[kind]
    for n_blocks, n in counts(b, name, depth):
        unit = unit_of(name, n_blocks)
        with cgutils.for_range(b, n) as loop:
            place = b.add(b.mul(loop.index, I64(n_tokens)), token)
            here = b.add(to, b.mul(place, I64(unit.size)))
            of = b.add(x, b.mul(loop.index, I64(_FLOAT * unit.n)))
            _Packing(b, unit, here, of).emit()
        to = b.add(to, b.mul(n, I64(n_tokens * unit.size)))
        x = b.add(x, b.mul(n, I64(_FLOAT * unit.n)))


class _Packing:
    """Emits the packing of a unit of x; addresses."""

    def __init__(self, builder: Any, unit: Unit, to: Any, x: Any) -> None:
        self.b, self.unit, self.to = builder, unit, to
        n = unit.n // F32X16.count
        self.values = [
            load(builder, at(builder, x, I64(F32X16.count * i)), F32X16) for i in range(n)
        ]

    def emit(self) -> None:
        """Bytes, scales, zero points and minima."""
        b, unit, p = self.b, self.unit, self.unit.plan
        pairs = zip(self.values[::2], self.values[1::2], strict=True)
        most = [b.bitcast(largest(b, [*pair]), ir.VectorType(I32, F32X16.count)) for pair in pairs]
        most = totals(b, most, lambda v, w: b.select(b.icmp_unsigned(">", v, w), v, w))
        scales, per_scale = scale_of(b, b.bitcast(most, ir.VectorType(F32, most.type.count)))
        groups = [self._bytes(i, per_scale) for i in range(unit.n // GROUP)]
        self._put_pieces(groups)
        of_halves = self._sums(groups)
        of_groups = _pair_sums(b, of_halves)
        sums = {1: of_groups, 2: of_halves}
        both = {n: shuffle(b, np.arange(unit.n // GROUP * n) // n, scales) for n in (1, 2)}
        factors = [*p.factors[:: 3 - p.of_group]]
        mine = both[p.of_group]
        self._put(b.fmul(mine, ir.Constant(mine.type, factors)), unit.n)
        if p.zero:
            zeros = b.fmul(b.fmul(mine, sums[p.of_group]), every(mine.type, -float(p.zero)))
            self._put(zeros, unit.zeros)
        if p.n_minima:
            n = p.n_minima * GROUP // unit.n
            self._put(b.fmul(both[n], sums[n]), unit.minima)

    def _bytes(self, group: int, per_scale: Any) -> Any:
        """GROUP numbers as bytes."""
        b = self.b
        each = shuffle(b, [group] * F32X16.count, per_scale)
        two = (round_product(b, v, each) for v in self.values[2 * group : 2 * group + 2])
        parts = [b.trunc(v, ir.VectorType(I8, F32X16.count)) for v in two]
        return concatenate(b, parts)

    def _put_pieces(self, groups: list[Any]) -> None:
        """The bytes, piece by piece."""
        p = self.unit.plan
        places = {piece: i for i, piece in enumerate(sum(p.vectors, ()))}
        of_group = GROUP // p.size
        for group, q in enumerate(groups):
            for i in range(of_group):
                piece = shuffle(self.b, p.within[p.size * i : p.size * (i + 1)], q)
                self._put(piece, p.size * places[group * of_group + i])

    def _sums(self, groups: list[Any]) -> Any:
        """Σ q of each SUBGROUP, as floats."""
        b, n = self.b, SUBGROUP // 4
        zeros, halves = every(ir.VectorType(I32, GROUP // 4), 0), []
        for q in groups:
            words = by_quads(b, every(q.type, 1), q, zeros)
            halves += [shuffle(b, range(first, first + n), words) for first in (0, n)]
        sums = totals(b, halves, b.add)
        return b.sitofp(sums, ir.VectorType(F32, sums.type.count))

    def _put(self, value: Any, offset: int) -> None:
        pointer = self.b.inttoptr(self.b.add(self.to, I64(offset)), value.type.as_pointer())
        self.b.store(value, pointer).align = 4


def _pair_sums(b: Any, v: Any) -> Any:
    """The sums of neighbouring lanes."""
    even, odd = (shuffle(b, range(first, v.type.count, 2), v) for first in (0, 1))
    return b.fadd(even, odd)
