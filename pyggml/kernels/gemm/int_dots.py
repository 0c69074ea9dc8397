"""Dot products of quantised rows, as they lie, with x in bytes: the work of generating a token.

One row of weights after the other, a unit to a step (pyggml.kernels.gemm.row_plan). Bytes of
weights meet bytes of x in sums of four products, integers; they become floats, and an FMA with
their scales adds them to the row's sums. Nothing is summed across lanes before the row's end. All
scales of a unit are decoded in one vector and multiplied once with those of x; what does not depend
on q, minima and zero points, is one FMA with sums of x. The bytes AHEAD are prefetched, line by
line: all of a row at once would wait for the buffers.

Packed x holds for each unit of n weights and each token: n bytes in the weights' order; then floats
of each SUBGROUP: x's scale, by the factor of the weights, and −zero · scale · Σ q if zero is not 0;
then, if the type has minima, scale · Σ q of whatever has one.
"""

from functools import reduce
from typing import Any, NamedTuple

from llvmlite import ir

from pyggml.graph.dtypes import dtype
from pyggml.jit import cgutils, intrinsic, types
from pyggml.jit.isa import CHOSEN
from pyggml.jit.llvm import (
    F32,
    I8,
    I32,
    I64,
    at,
    declare_intrinsic,
    every,
    fma,
    quads,
    signed_quads,
    total,
)
from pyggml.kernels.gemm.activations import rounded_block
from pyggml.kernels.gemm.row_plan import UNIT, VECTOR, Plan, decoded, plan, units
from pyggml.quants.layout import GROUP, SUBGROUP
from pyggml.quants.readers.pieces import PieceBlock
from pyggml.quants.unpack import WHOLE_TYPES
from pyggml.sizes import round_up

AHEAD = 8192  # bytes; half does a tenth worse, twice as many as well
CHAINS = 4 if CHOSEN.lanes == 16 else 1  # vectors of sums of a row: none waits for another
TOGETHER = 4  # tokens at most
_SUMS = ir.VectorType(F32, VECTOR // 4)
_LINE = 64
_FLOAT = 4  # bytes


class _Unit(NamedTuple):
    """Where the terms of a unit of packed x are, in bytes."""

    plan: Plan
    n: int  # weights
    scales: int
    zeros: int
    minima: int
    size: int


def _unit(name: str, n_blocks: int) -> _Unit:
    p, n = plan(name, n_blocks), n_blocks * dtype(name).block
    n_subgroups = n // SUBGROUP
    zeros = n + _FLOAT * n_subgroups
    minima = zeros + _FLOAT * n_subgroups * (p.zero != 0)
    size = round_up(minima + _FLOAT * p.n_minima, _LINE)
    return _Unit(p, n, n, zeros, minima, size)


def packed_bytes(name: str, depth: int) -> int:
    """Bytes of a packed token."""
    return sum(_unit(name, n_blocks).size * n for n_blocks, n in units(dtype(name), depth))


@intrinsic(prefer_literal=True)
def pack_token(
    typing: Any, kind: Any, n_tokens: Any, to: Any, token: Any, x: Any, depth: Any
) -> Any:
    """x of token number `token`, `depth` numbers, to packed x of n_tokens; addresses. kind: of
    WHOLE_TYPES; it and n_tokens are constants."""
    name, together = WHOLE_TYPES[kind.literal_value], n_tokens.literal_value

    def codegen(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, _, to, token, x, depth = arguments
        for n_blocks, n in _counts(b, name, depth):
            unit = _unit(name, n_blocks)
            with cgutils.for_range(b, n) as loop:
                place = b.add(b.mul(loop.index, I64(together)), token)
                here = b.add(to, b.mul(place, I64(unit.size)))
                of = b.add(x, b.mul(loop.index, I64(_FLOAT * unit.n)))
                _emit_packed(b, unit, here, of)
            to = b.add(to, b.mul(n, I64(together * unit.size)))
            x = b.add(x, b.mul(n, I64(_FLOAT * unit.n)))
        return context.get_dummy_value()

    return types.void(kind, n_tokens, *(types.intp,) * 4), codegen


def _counts(b: Any, name: str, depth: Any) -> list[tuple[int, Any]]:
    """(blocks of a unit, units of that size) of a row, one size after the other."""
    block = dtype(name).block
    most = max(1, UNIT // block)
    whole = most, b.udiv(depth, I64(most * block))
    left = 1, b.udiv(b.urem(depth, I64(most * block)), I64(block))
    return [whole] if most == 1 else [whole, left]


def _emit_packed(b: Any, unit: _Unit, to: Any, x: Any) -> None:
    """A unit of x: its bytes, piece by piece, and its terms."""
    p = unit.plan
    places = {piece: i for i, piece in enumerate(sum(p.vectors, ()))}

    def put(value: Any, offset: int) -> None:
        pointer = b.inttoptr(b.add(to, I64(offset)), value.type.as_pointer())
        b.store(value, pointer).align = min(4, p.size)

    for group in range(unit.n // GROUP):
        q, scale, sums = rounded_block(b, x, I64(GROUP * group))
        q = b.shuffle_vector(q, q, ir.Constant(ir.VectorType(I32, GROUP), [*p.within]))
        for i in range(GROUP // p.size):
            lanes = range(p.size * i, p.size * (i + 1))
            piece = b.shuffle_vector(q, q, ir.Constant(ir.VectorType(I32, p.size), [*lanes]))
            put(piece, p.size * places[group * GROUP // p.size + i])
        halves = []
        for half in range(2):
            subgroup, four = 2 * group + half, ir.VectorType(I32, 4)
            lanes = ir.Constant(four, [4 * half + i for i in range(4)])
            add = declare_intrinsic(b, "llvm.vector.reduce.add.v4i32", I32, [four])
            total = b.sitofp(b.call(add, [b.shuffle_vector(sums, sums, lanes)]), F32)
            halves.append(total)
            factor = ir.Constant(F32, p.factors[subgroup])
            put(b.fmul(scale, factor), unit.scales + _FLOAT * subgroup)
            if p.zero:
                zeros = b.fmul(b.fmul(scale, total), ir.Constant(F32, -p.zero))
                put(zeros, unit.zeros + _FLOAT * subgroup)
        if p.n_minima == unit.n // GROUP:
            put(b.fmul(scale, b.fadd(*halves)), unit.minima + _FLOAT * group)
        elif p.n_minima:
            for half, total in enumerate(halves):
                put(b.fmul(scale, total), unit.minima + _FLOAT * (2 * group + half))


class _Row:
    """Emits the products of a unit with each token; sums: vectors of each token."""

    def __init__(self, builder: Any, unit: _Unit, block: PieceBlock, x: Any, sums: Any) -> None:
        self.b, self.unit, self.block, self.sums = builder, unit, block, sums
        self.x = [builder.add(x, I64(t * unit.size)) for t in range(len(sums))]
        self._turn = 0

    def emit(self) -> None:
        """All products, and what minima and zero points add."""
        b, unit, p = self.b, self.unit, self.unit.plan
        scales = self.block.scales()
        n = scales.type.count
        if p.zero:
            self._add([(scales, self._read(t, unit.zeros, F32, n)) for t in range(len(self.x))])
        if p.n_minima:
            minima = self.block.minima
            self._add(
                [(minima, self._read(t, unit.minima, F32, p.n_minima))
                 for t in range(len(self.x))]
            )  # fmt: skip
        scaled = [b.fmul(scales, self._read(t, unit.scales, F32, n)) for t in range(len(self.x))]
        for some in p.sums:
            weights = [self.block.wide(p.pieces[piece] for piece in p.vectors[i]) for i in some]
            lanes = ir.Constant(ir.VectorType(I32, weights[0].type.count // 4), p.lanes(some[0]))
            self._add([
                (self._products(weights, some, t), b.shuffle_vector(each, each, lanes))
                for t, each in enumerate(scaled)
            ])  # fmt: skip

    def _read(self, t: int, offset: int, kind: Any, n: int) -> Any:
        vector = ir.VectorType(kind, n)
        loaded = self.b.load(self.b.inttoptr(self.b.add(self.x[t], I64(offset)), vector.as_pointer()))
        loaded.align = 4
        return loaded

    def _products(self, weights: list[Any], vectors: tuple[int, ...], t: int) -> Any:
        """Sums of four products over vectors of weights, as floats."""
        b, n = self.b, weights[0].type.count
        sums = every(ir.VectorType(I32, n // 4), 0)
        multiply = signed_quads if self.unit.plan.signed else quads
        for each, vector in zip(weights, vectors, strict=True):
            sums = multiply(b, each, self._read(t, n * vector, I8, n), sums)
        return b.sitofp(sums, ir.VectorType(F32, n // 4))

    def _add(self, factors: list[tuple[Any, Any]]) -> None:
        """To each token's sums: a product."""
        for mine, (one, other) in zip(self.sums, factors, strict=True):
            to = mine[self._turn % len(mine)]
            n, most = one.type.count, _SUMS.count
            sums = self.b.load(to)
            if n == most:
                self.b.store(fma(self.b, one, other, sums), to)
                continue
            lanes = ir.Constant(ir.VectorType(I32, most), [*range(n), *(n,) * (most - n)])
            product = self.b.fmul(one, other)
            product = self.b.shuffle_vector(product, every(product.type, 0.0), lanes)
            self.b.store(self.b.fadd(sums, product), to)
        self._turn += 1


@intrinsic(prefer_literal=True)
def int_dots(
    typing: Any, kind: Any, n_tokens: Any, to: Any, step: Any, row: Any, x: Any, depth: Any
) -> Any:
    """Σ w x of a row of type WHOLE_TYPES[kind] with n_tokens, both constants, to float32 at `to`,
    `step` bytes apart. row, x: addresses of the row and of packed x; depth: numbers of a row."""
    name, n = WHOLE_TYPES[kind.literal_value], n_tokens.literal_value

    def codegen(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, _, to, step, row, x, depth = arguments
        chains = max(1, CHAINS // n)
        sums = [[cgutils.alloca_once(b, _SUMS) for _ in range(chains)] for _ in range(n)]
        for chain in (chain for mine in sums for chain in mine):
            b.store(every(_SUMS, 0.0), chain)
        for n_blocks, units_of_size in _counts(b, name, depth):
            row, x = _emit_units(b, name, n_blocks, units_of_size, row, x, sums)
        for t, mine in enumerate(sums):
            found = total(b, reduce(b.fadd, [b.load(chain) for chain in mine]))
            b.store(found, at(b, b.add(to, b.mul(step, I64(t))), I64(0)))
        return context.get_dummy_value()

    return types.void(kind, n_tokens, *(types.intp,) * 5), codegen


def _emit_units(
    b: Any, name: str, n_blocks: int, n: Any, row: Any, x: Any, sums: list[list[Any]]
) -> tuple[Any, Any]:
    """n units of a row; returns where row and x go on."""
    unit = _unit(name, n_blocks)
    row_bytes, x_bytes = n_blocks * dtype(name).block_bytes, len(sums) * unit.size
    with cgutils.for_range(b, n) as loop:
        source = b.add(row, b.mul(loop.index, I64(row_bytes)))
        here = b.add(x, b.mul(loop.index, I64(x_bytes)))
        for line in range(0, row_bytes, _LINE):
            _fetch_once(b, b.add(source, I64(AHEAD + line)))
        block = decoded(b, source, name, n_blocks)
        _Row(b, unit, block, here, sums).emit()
    return b.add(row, b.mul(n, I64(row_bytes))), b.add(x, b.mul(n, I64(x_bytes)))


def _fetch_once(b: Any, address: Any) -> None:
    """Prefetch a line that is used once: it displaces nothing in the caches that lie behind."""
    byte = I8.as_pointer()
    kinds = [byte, I32, I32, I32]
    fetch = declare_intrinsic(b, "llvm.prefetch.p0i8", ir.VoidType(), kinds)
    b.call(fetch, [b.inttoptr(address, byte), I32(0), I32(0), I32(1)])
