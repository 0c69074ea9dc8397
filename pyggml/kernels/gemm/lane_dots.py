"""Dot products of LANES quantised rows at once, a row in each lane, with a few tokens in bytes.

A block of the rows is decoded into registers (pyggml.quants.readers.lanes) and meets each token
there. Every sum of a row and a token stays in its lane, so that a token's products are the same
whatever tokens are beside it.

Packed x holds for each block of GROUP numbers: the bytes of every token, BLOCK_WORDS words; then,
for one term after the other, that of every token: scale, total, and the starts of the block, of its
first and of its second SUBGROUP (pyggml.kernels.gemm.activations).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from pyggml.graph.dtypes import dtype
from pyggml.jit import cgutils, instruction, types
from pyggml.jit.isa import CHOSEN
from pyggml.jit.llvm import I64, OFFSET, at, by_quads, each_in_all_lanes, every, fma, store
from pyggml.kernels.gemm.activations import BLOCK_WORDS
from pyggml.kernels.gemm.microkernel import zeros
from pyggml.quants.layout import GROUP, SUBGROUP
from pyggml.quants.readers.lanes import BYTES, FLOATS, INTS, LANES, LOAD, LaneBlock, Lanes
from pyggml.quants.unpack import INTEGER_TYPES, LAYOUTS

KINDS = [name for name in INTEGER_TYPES if dtype(name).block_bytes >= LOAD]
TOGETHER = 8 if CHOSEN.lanes == 16 else 4  # tokens whose sums leave registers for a block of rows
SCALE, TOTAL, START, FIRST, SECOND = range(5)  # terms
TOKEN_WORDS = BLOCK_WORDS + 5  # of a block of a token: bytes and terms
_HALF = SUBGROUP // 4  # words


class _LaneDots(LaneBlock):
    """Adds the block's products with n tokens to their sums; x: their packed block."""

    def __init__(
        self, sums: list[Any], n_bytes: int, builder: Any, source: Any, step: Any, x: Any
    ) -> None:
        super().__init__(builder, source, step, n_bytes)
        self._sums, self._x = sums, x
        self._of_subgroups: Lanes = ()  # minima
        self._blocks: dict[int, Callable[[int, Any], Any]] = {}  # of x

    def add_minima(self, minima: Lanes) -> None:
        if len(minima) == 2 * BLOCK_WORDS:
            per_start = every(FLOATS, -1 / 128)  # starts are −128 · Σ q of x
            self._of_subgroups = tuple(self.b.fmul(v, per_start) for v in minima)
            return
        for block, minimum in enumerate(minima):
            for t in range(len(self._sums)):
                self._add(t, minimum, self._term(TOTAL, GROUP * block, t))

    def add(self, scale: Lanes, q: Lanes, i: int = 0) -> None:
        self._add_products(scale, q, i, 0, START, ())

    def add_two(self, scales: tuple[Lanes, Lanes], q: Lanes, i: int, most: int) -> None:
        minima = self._of_subgroups[i // SUBGROUP :]
        self._add_products(scales[0], q[:_HALF], i, 0, FIRST, minima[:1])
        self._add_products(scales[1], q[_HALF:], i, _HALF, SECOND, minima[1:2])

    def _add_products(
        self, scale: Lanes, q: Lanes, i: int, first: int, start: int, minimum: Lanes
    ) -> None:
        """Sums += x's scale · (scale · Σ q x + minimum · start) over words of a block of x, from
        word `first` on."""
        if OFFSET:
            q = tuple(self.b.xor(v, every(BYTES, -OFFSET)) for v in q)
        multiplied = [self.b.bitcast(v, INTS) for v in q]
        for t in range(len(self._sums)):
            begin = self.b.bitcast(self._term(start, i, t), INTS)
            whole = begin if OFFSET else every(INTS, 0)
            for word, weights in enumerate(multiplied, t * BLOCK_WORDS + first):
                x = self._each_lane(i, word, INTS)
                whole = by_quads(self.b, weights, x, whole)
            products = self.b.fmul(self.b.sitofp(whole, FLOATS), scale[0])
            if minimum:
                products = fma(self.b, self.b.sitofp(begin, FLOATS), minimum[0], products)
            self._add(t, products, self._term(SCALE, i, t))

    def _add(self, t: int, a: Any, b: Any) -> None:
        self.b.store(fma(self.b, a, b, self.b.load(self._sums[t])), self._sums[t])

    def _term(self, which: int, i: int, t: int) -> Any:
        """A term of token t in the block with weight i, in every lane."""
        n = len(self._sums)
        return self._each_lane(i, n * (BLOCK_WORDS + which) + t, FLOATS)

    def _each_lane(self, i: int, word: int, kind: Any) -> Any:
        """A word of the packed block with weight i, in every lane."""
        block, size = i // GROUP, len(self._sums) * TOKEN_WORDS
        if block not in self._blocks:
            first = ir.Constant(I64, block * size)
            self._blocks[block] = each_in_all_lanes(self.b, self._x, first, size)
        return self._blocks[block](word, kind)


@instruction(types.void(*(types.intp,) * 5), n_constants=2)
def lane_dots(
    builder: Any, kind: int, n: int, rows: Any, step: Any, x: Any, depth: Any, to: Any
) -> None:
    """(n, LANES) float32 at `to` = the products of n tokens with LANES rows.

    kind, n          constants: KINDS[kind] is the rows' type
    rows, step       address of the first row, bytes from row to row
    x, depth         address of packed x, numbers of a row
    """
    weights = dtype(KINDS[kind])
    sums = zeros(builder, FLOATS, n)
    many = max(weights.block, GROUP)
    n_blocks = builder.udiv(depth, ir.Constant(I64, many))
    x_bytes = many // GROUP * n * TOKEN_WORDS * 4
    block = partial(_LaneDots, sums, weights.block_bytes)
    with cgutils.for_range(builder, n_blocks) as loop:
        here = builder.mul(loop.index, ir.Constant(I64, weights.block_bytes))
        x_here = builder.mul(loop.index, ir.Constant(I64, x_bytes))
        source, tokens = builder.add(rows, here), builder.add(x, x_here)
        LAYOUTS[weights.name](block(builder, source, step, tokens))
    for t, each in enumerate(sums):
        store(builder, builder.load(each), at(builder, to, ir.Constant(I64, t * LANES)))
