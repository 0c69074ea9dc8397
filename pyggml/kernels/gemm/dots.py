"""Dot products of quantised rows with x, without unpacking: the work of generating a token.

Weights are scale·q + minimum in groups of 16 or more. A group's part of a dot product is therefore
scale·Σ q x + minimum·Σ x, and Σ x is the same for every row. With x in float32, the whole numbers q
become vectors of floats. With x in bytes (pyggml.kernels.gemm.activations), Σ q x is a sum of
integers, and exact. Direct types (pyggml.quants.base) are multiplied so; others are unpacked first.
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import reduce
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from pyggml.graph.dtypes import DType, dtype
from pyggml.jit import cgutils, instruction, kernel, types
from pyggml.jit.isa import CHOSEN
from pyggml.jit.llvm import (
    I8,
    I32,
    I64,
    at,
    broadcast,
    every,
    fma,
    load,
    prefetch,
    shuffle,
    store,
    total,
)
from pyggml.kernels.gemm.activations import BLOCK_WORDS
from pyggml.kernels.gemm.microkernel import zeros
from pyggml.quants.layout import GROUP, SUBGROUP
from pyggml.quants.readers.vectors import F32X8, F32X16, VectorBlock
from pyggml.quants.unpack import DIRECT_TYPES, LAYOUTS

LONGEST = 1 << 16  # numbers of a row whose sums fit into a thread's scratch
# Rows that are multiplied at once. On Intel's CPUs with tiles, a thread takes a fifth more from
# memory in four streams, each fetched block by block, than in one; on AMD's Zen 4 it takes less.
TOGETHER = 4 if CHOSEN.tiles else 1
_CHAINS = 4  # independent sums of a row, so that none waits for another
_EIGHT_INTS = ir.VectorType(I32, BLOCK_WORDS)


def step(kind: DType) -> int:
    """How many weights one round of the loop over a row takes; a row is a multiple of it."""
    return max(kind.block, GROUP)


def kind_of_rows(kind: DType, depth: int) -> int:
    """The number of a type in row_dots; -1 if that cannot take rows of it."""
    fits = kind.name in DIRECT_TYPES and depth % step(kind) == 0 and depth <= LONGEST
    return DIRECT_TYPES.index(kind.name) if fits else -1


@kernel
def group_sums(sums, x):
    """Sums of GROUP neighbours of x."""
    for i in range(x.size // GROUP):
        total = np.float32(0)
        for j in range(GROUP):
            total += x[i * GROUP + j]
        sums[i] = total


class _Dot(VectorBlock):
    """Adds a block's part to chains of vector sums."""

    def __init__(self, chains: list[Any], builder: Any, source: Any, sums: Any) -> None:
        super().__init__(builder, source)
        self._chains, self._sums = cycle(chains), sums
        self._of_subgroups = None  # minima

    def _sum(self, a: Any, b: Any) -> None:
        sums = next(self._chains)
        self.b.store(fma(self.b, a, b, self.b.load(sums)), sums)

    def _load(self, base: Any, i: int, kind: Any) -> Any:
        return load(self.b, at(self.b, base, ir.Constant(I64, i)), kind)

    @abstractmethod
    def _widen(self, eight: Any) -> Any:
        """Eight floats as long as a chain, with zeros."""

    def add_minimum(self, minimum: Any) -> None:
        product = self.b.fmul(minimum, self.b.load(at(self.b, self._sums, ir.Constant(I64, 0))))
        first = self.b.insert_element(every(F32X8, 0.0), product, ir.Constant(I32, 0))
        self._sum(self._widen(first), self._widen(every(F32X8, 1.0)))

    def add_minima(self, minima: Any) -> None:
        if minima.type == F32X16:
            self._of_subgroups = minima
        else:
            self._sum(self._widen(minima), self._widen(self._load(self._sums, 0, F32X8)))

    def _two_minima(self, i: int) -> Sequence[Any]:
        """The minima of the SUBGROUPs from weight i on; none, if they have none of their own."""
        if self._of_subgroups is None:
            return ()
        return [self.lane(self._of_subgroups, i // SUBGROUP + n) for n in range(2)]


class _FloatDot(_Dot):
    """Σ w x with x in float32."""

    def __init__(self, chains: list[Any], builder: Any, source: Any, x: Any, sums: Any) -> None:
        super().__init__(chains, builder, source, sums)
        self._x = x

    def add(self, scale: Any, q: Any, i: int = 0) -> None:
        part = every(F32X16, 0.0)
        for n, floats in enumerate(self.subgroups(q)):
            part = fma(self.b, floats, self._load(self._x, i + n * SUBGROUP, F32X16), part)
        self._sum(part, broadcast(self.b, scale, F32X16))

    def add_two(self, scales: tuple[Any, Any], q: Any, i: int, most: int) -> None:
        b, minima = self.b, self._two_minima(i)
        for n, (scale, floats) in enumerate(zip(scales, self.subgroups(q), strict=True)):
            each = broadcast(b, scale, F32X16)
            weights = fma(b, floats, each, broadcast(b, minima[n], F32X16)) if minima else None
            self.add_floats(weights or b.fmul(floats, each), i + n * SUBGROUP)

    def add_floats(self, floats: Any, i: int) -> None:
        self._sum(floats, self._load(self._x, i, F32X16))

    def _widen(self, eight: Any) -> Any:
        return shuffle(self.b, range(SUBGROUP), eight, every(F32X8, 0.0))


class _RowsTogether(NamedTuple):
    """Up to TOGETHER rows: n of them, at least one."""

    address: Any
    stride: Any  # bytes from row to row
    n: Any


@instruction(types.void(*(types.intp,) * 7), n_constants=1)
def row_dots(
    builder: Any, kind: int, to: Any, row: Any, stride: Any, n_rows: Any, x: Any, sums: Any,
    depth: Any,
) -> None:  # fmt: skip
    """Σ w x of up to TOGETHER rows of type `kind`, a constant; addresses of TOGETHER results, the
    first row, x and x's group sums."""
    rows, sizes = _RowsTogether(row, stride, n_rows), (4 * GROUP, 4)
    _emit_rows(
        builder, to, rows, [x, sums], depth, dtype(DIRECT_TYPES[kind]), _FloatDot, F32X16, sizes
    )


def _emit_rows(
    b: Any, to: Any, rows: _RowsTogether, bases: list[Any], depth: Any, kind: DType, dot: Any,
    vector: Any, sizes: tuple[int, ...],
) -> None:  # fmt: skip
    """The loop over the rows' blocks; sizes: bytes that GROUP weights meet in each array of x.

    Every row has chains of its own. Where there are fewer rows, the last one is taken again. Of
    several rows, the ones after the next are fetched; a single one is fetched by the caller.
    """
    n = step(kind)
    row_step, steps = n // kind.block * kind.block_bytes, [n // GROUP * size for size in sizes]
    chains = zeros(b, vector, TOGETHER, _CHAINS)
    last = b.sub(rows.n, I64(1))
    numbers = [b.select(b.icmp_signed("<", I64(i), last), I64(i), last) for i in range(TOGETHER)]
    starts = [b.add(rows.address, b.mul(rows.stride, i)) for i in numbers]
    ahead = b.mul(rows.stride, I64(2 * TOGETHER))
    with cgutils.for_range(b, b.udiv(depth, I64(n))) as loop:
        here = [
            b.add(base, b.mul(loop.index, I64(size)))
            for base, size in zip(bases, steps, strict=True)
        ]
        for start, mine in zip(starts, chains, strict=True):
            block = b.add(start, b.mul(loop.index, I64(row_step)))
            for line in range(0, row_step if TOGETHER > 1 else 0, 64):
                prefetch(b, b.inttoptr(b.add(b.add(block, ahead), I64(line)), I8.as_pointer()))
            LAYOUTS[kind.name](dot(mine, b, block, *here))
    for i, mine in enumerate(chains):
        store(b, total(b, reduce(b.fadd, [b.load(chain) for chain in mine])), at(b, to, I64(i)))
