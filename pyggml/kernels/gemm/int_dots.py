"""Dot products of quantised rows, as they lie, with x in bytes: the work of generating a token.

One row of weights after the other, a unit to a step (pyggml.kernels.gemm.row_plan). Bytes of
weights meet bytes of x in sums of four products, integers; they become floats, and an FMA with
their scales adds them to the row's sums. Nothing is summed across lanes before the row's end. All
scales of a unit are decoded in one vector and multiplied once with those of x; what does not depend
on q, minima and zero points, is one FMA with sums of x (pyggml.kernels.gemm.int_pack). The bytes
AHEAD are prefetched, line by line: all of a row at once would wait for the buffers.
"""

from functools import reduce
from typing import Any

from llvmlite import ir

from pyggml.graph.dtypes import dtype
from pyggml.jit import cgutils, instruction, types
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
    prefetch,
    quads,
    shuffle,
    signed_quads,
    total,
)
from pyggml.kernels.gemm.int_pack import Unit, counts, unit_of
from pyggml.kernels.gemm.row_plan import VECTOR, decode
from pyggml.quants.readers.pieces import PieceBlock
from pyggml.quants.unpack import WHOLE_TYPES

AHEAD = 8192  # bytes; half does a tenth worse, twice as many as well
# Where rows are fetched to, as LLVM numbers caches: 0 displaces nothing behind the first. A Xeon
# with AMX then reads from memory what its large last cache could keep, few lines at a time.
_CACHE = 2 if CHOSEN.tiles else 0
# Vectors of sums of a row and a token: none waits for another. As many for any number of tokens, so
# that a token's products do not depend on those beside it.
CHAINS = 4 if CHOSEN.lanes == 16 or CHOSEN.neon else 1
_LANES = VECTOR // 4
_LINE = 64  # bytes


class _Sums:
    """A token's sums of a row: vectors of _LANES floats in turns, and narrower ones."""

    def __init__(self, builder: Any) -> None:
        self.b, self._turn = builder, 0
        self._vectors = {_LANES: [self._zeros(_LANES) for _ in range(CHAINS)]}

    def _zeros(self, n: int) -> Any:
        kind = ir.VectorType(F32, n)
        return cgutils.alloca_once_value(self.b, every(kind, 0.0))  # LLVM: a register

    def prepare(self, n: int) -> None:
        """Have a vector of n floats, before the loop that adds to it."""
        if n not in self._vectors:
            self._vectors[n] = [self._zeros(n)]

    def add(self, one: Any, other: Any) -> None:
        """Sums += one · other."""
        vectors = self._vectors[one.type.count]
        to = vectors[self._turn % len(vectors)]
        self._turn += one.type.count == _LANES
        self.b.store(fma(self.b, one, other, self.b.load(to)), to)

    def total(self) -> Any:
        """All of them together."""
        wide = reduce(self.b.fadd, map(self.b.load, self._vectors.pop(_LANES)))
        whole = total(self.b, wide)
        for (vector,) in self._vectors.values():
            whole = self.b.fadd(whole, total(self.b, self.b.load(vector)))
        return whole


class _Row:
    """Emits the products of a unit with each token."""

    def __init__(
        self, builder: Any, unit: Unit, block: PieceBlock, x: Any, sums: list[_Sums]
    ) -> None:
        self.b, self.unit, self.block, self.sums = builder, unit, block, sums
        self.x = [builder.add(x, I64(t * unit.size)) for t in range(len(sums))]

    def emit(self) -> None:
        """All products, and what minima and zero points add."""
        unit, p = self.unit, self.unit.plan
        scales = self.block.scales(p.of_group)
        weights = [
            [self.block.wide(p.pieces[piece] for piece in p.vectors[i]) for i in indices]
            for indices in p.sums
        ]
        for t, sums in enumerate(self.sums):
            if p.zero:
                sums.add(scales, self._read(t, unit.zeros, F32, unit.n_scales))
            if p.n_minima:
                sums.add(self.block.minima, self._read(t, unit.minima, F32, p.n_minima))
            mine = self.b.fmul(scales, self._read(t, unit.n, F32, unit.n_scales))
            for indices, vectors in zip(p.sums, weights, strict=True):
                products = self._products(vectors, indices, t)
                sums.add(products, self._permute(mine, p.lanes(indices[0])))

    def _permute(self, scales: Any, lanes: list[int]) -> Any:
        """scales[lanes]. By name where one instruction does it: LLVM would take two that need no
        vector of numbers, which stays in a register here."""
        b, n = self.b, len(lanes)
        if CHOSEN.lanes < 16 or n != 16:
            return shuffle(b, lanes, scales)
        wide = [*range(scales.type.count), *(0,) * (16 - scales.type.count)]
        scales, indices = shuffle(b, wide, scales), ir.Constant(ir.VectorType(I32, n), lanes)
        kinds = [scales.type, indices.type]
        permute = declare_intrinsic(b, "llvm.x86.avx512.permvar.sf.512", kinds[0], kinds)
        return b.call(permute, [scales, indices])

    def _read(self, t: int, offset: int, kind: Any, n: int) -> Any:
        vector, here = ir.VectorType(kind, n), self.b.add(self.x[t], I64(offset))
        loaded = self.b.load(self.b.inttoptr(here, vector.as_pointer()))
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


@instruction(types.void(*(types.intp,) * 6), n_constants=2)
def int_dots(
    b: Any, kind: int, n: int, to: Any, step: Any, row: Any, x: Any, ahead: Any, depth: Any
) -> None:
    """Σ w x of a row of type WHOLE_TYPES[kind] with n tokens, both constants, to float32 at `to`,
    `step` bytes apart. row, x: addresses of the row and of packed x; ahead: how far behind what is
    multiplied lies what is fetched, in bytes; depth: numbers of a row."""
    name = WHOLE_TYPES[kind]
    sums = [_Sums(b) for _ in range(n)]
    for n_blocks, units_of_size in counts(b, name, depth):
        row, x = _emit_units(b, name, n_blocks, units_of_size, row, x, sums, ahead)
    for t, mine in enumerate(sums):
        b.store(mine.total(), at(b, b.add(to, b.mul(step, I64(t))), I64(0)))


def _emit_units(
    b: Any, name: str, n_blocks: int, n: Any, row: Any, x: Any, sums: list[_Sums], ahead: Any
) -> tuple[Any, Any]:
    """n units of a row; returns where row and x go on."""
    unit = unit_of(name, n_blocks)
    row_bytes, x_bytes = n_blocks * dtype(name).block_bytes, len(sums) * unit.size
    n_lanes = len(unit.plan.vectors[0]) * unit.plan.size // 4
    for mine in sums:
        for size in (n_lanes, unit.n_scales, unit.plan.n_minima or n_lanes):
            mine.prepare(size)
    with cgutils.for_range(b, n) as loop:
        source = b.add(row, b.mul(loop.index, I64(row_bytes)))
        here = b.add(x, b.mul(loop.index, I64(x_bytes)))
        there = b.add(source, ahead)
        for line in range(0, row_bytes, _LINE):
            line_at = b.inttoptr(b.add(there, I64(line)), I8.as_pointer())
            prefetch(b, line_at, cache=_CACHE)
        _Row(b, unit, decode(b, source, name, n_blocks), here, sums).emit()
    return b.add(row, b.mul(n, I64(row_bytes))), b.add(x, b.mul(n, I64(x_bytes)))
