"""A tile of attention in registers: KEYS neighbouring keys and one query's heads, one or two.

Keys and values are arrays (S, HK, D) of float32, or of float16 as uint16, or of Q8_0 as bytes
(S, HK, D / 32 · 34); the last two become float32 on their way from memory. Queries, scores and sums
are rows of float32, one for each head. A tile takes the whole vectors of a row: its first
D // LANES · LANES numbers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from pyggml.graph.dtypes import F16, Q8_0
from pyggml.graph.dtypes import F32 as FLOATS
from pyggml.jit import JIT, cgutils, intrinsic, types
from pyggml.jit.isa import CHOSEN
from pyggml.jit.llvm import (
    F32,
    I8,
    I32,
    I64,
    broadcast,
    fma,
    from_f16,
    load,
    prefetch,
    store,
    totals,
)
from pyggml.kernels.gemm.microkernel import zeros

KEYS = 4
_AHEAD = 12 << 10  # bytes ahead that rows are fetched into the second cache, measured
_LINE = 64  # bytes of a cache line
LANES = CHOSEN.lanes
_FLOATS = ir.VectorType(F32, LANES)
_FLOATS16 = ir.VectorType(ir.HalfType(), LANES)


class HeadRows(NamedTuple):
    """Rows of float32, one for each head, as both tiles take them."""

    address: int
    step: int  # bytes from row to row


class Keys(NamedTuple):
    """The keys of a tile: `first` … of one head; those after `last` of it stand for `last`."""

    first: int
    head: int
    last: int
    after: int  # address of what is read after the rows up to `last` of all heads


class _Rows:
    """Float32 rows, `step` bytes apart."""

    size, kind, vector = 4, F32, _FLOATS
    width = 4 * LANES  # bytes of LANES numbers

    def __init__(self, builder: Any, base: Any, step: Any) -> None:
        self.b, self.base, self.step = builder, base, step

    def row(self, i: Any) -> Any:
        """Its address."""
        return self.b.add(self.base, self.b.mul(i, self.step))

    def at(self, row: Any, element: Any) -> Any:
        """Pointer to a number of the row at this address."""
        address = self.b.add(row, self.b.mul(element, ir.Constant(I64, self.size)))
        return self.b.inttoptr(address, self.kind.as_pointer())

    def floats(self, row: Any, element: Any) -> Any:
        """LANES numbers."""
        return load(self.b, self.at(row, element), self.vector)

    def number(self, row: Any, element: Any) -> Any:
        """One number, as a float."""
        return self.b.load(self.at(row, element))

    @staticmethod
    def numbers(builder: Any, size: Any) -> Any:
        """How many numbers `size` elements of an array hold."""
        return size


class _Rows16(_Rows):
    """Rows of float16."""

    size, kind, vector = 2, ir.HalfType(), _FLOATS16
    width = 2 * LANES

    def floats(self, row: Any, element: Any) -> Any:
        return from_f16(self.b, super().floats(row, element), _FLOATS)

    def number(self, row: Any, element: Any) -> Any:
        return from_f16(self.b, super().number(row, element), F32)


class _RowsQ8(_Rows):
    """Rows of Q8_0: blocks of a float16 scale and 32 bytes."""

    size, kind = 1, I8
    _BLOCK, _BYTES = 32, 34
    width = LANES * _BYTES // _BLOCK

    def at(self, row: Any, element: Any) -> Any:
        block, rest = (op(element, ir.Constant(I64, self._BLOCK)) for op in self._ops)
        start = self.b.mul(block, ir.Constant(I64, self._BYTES))
        return super().at(row, self.b.add(start, self.b.add(rest, ir.Constant(I64, 2))))

    def floats(self, row: Any, element: Any) -> Any:
        bytes_ = self._load_unaligned(self.at(row, element), ir.VectorType(I8, LANES))
        whole = self.b.sitofp(self.b.sext(bytes_, ir.VectorType(I32, LANES)), _FLOATS)
        return self.b.fmul(whole, broadcast(self.b, self._scale(row, element), _FLOATS))

    def number(self, row: Any, element: Any) -> Any:
        whole = self.b.sitofp(self.b.load(self.at(row, element)), F32)
        return self.b.fmul(whole, self._scale(row, element))

    @staticmethod
    def numbers(builder: Any, size: Any) -> Any:
        n_blocks = builder.udiv(size, ir.Constant(I64, _RowsQ8._BYTES))
        return builder.mul(n_blocks, ir.Constant(I64, _RowsQ8._BLOCK))

    @property
    def _ops(self) -> tuple[Any, Any]:
        return self.b.udiv, self.b.urem

    def _scale(self, row: Any, element: Any) -> Any:
        """The scale of an element's block."""
        block = self.b.udiv(element, ir.Constant(I64, self._BLOCK))
        start = super().at(row, self.b.mul(block, ir.Constant(I64, self._BYTES)))
        return from_f16(self.b, self._load_unaligned(start, ir.HalfType()), F32)

    def _load_unaligned(self, pointer: Any, kind: Any) -> Any:
        value = self.b.load(self.b.bitcast(pointer, kind.as_pointer()))
        value.align = 1
        return value


_KINDS = {types.float32: _Rows, types.uint16: _Rows16, types.uint8: _RowsQ8}
READ = FLOATS, F16, Q8_0  # the types of keys and values that tiles read as they lie


class _Tile:
    """The common part of both tiles, while their code is emitted."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.b, self.n_heads = builder, signature.args[0].literal_value
        _, x, keys, *self.arguments = arguments
        first, head, last, self.after = cgutils.unpack_tuple(builder, keys)
        array = context.make_array(signature.args[1])(context, builder, x)
        _, n_heads, size = cgutils.unpack_tuple(builder, array.shape)
        kind = _KINDS[signature.args[1].dtype]
        self.depth, row = (
            kind.numbers(builder, size),
            builder.mul(size, ir.Constant(I64, kind.size)),
        )
        step, of_head = builder.mul(n_heads, row), builder.mul(head, row)
        start = builder.add(builder.ptrtoint(array.data, I64), builder.mul(first, step))
        self.keys = kind(builder, builder.add(start, of_head), step)
        self.stop = builder.add(start, builder.mul(builder.add(last, I64(1)), step))
        # A tile fetches as many bytes as it reads, in memory order over the tiles of all heads.
        self.ahead = builder.add(start, builder.mul(of_head, I64(KEYS)))
        self.ahead = builder.add(self.ahead, I64(_AHEAD))
        numbers = [ir.Constant(I64, i) for i in range(KEYS)]
        inside = [builder.icmp_signed("<", i, last) for i in numbers]
        present = [builder.select(is_in, i, last) for is_in, i in zip(inside, numbers, strict=True)]
        self.key_rows = [self.keys.row(i) for i in present]

    def rows(self, i: int) -> tuple[_Rows, list[Any]]:
        """The i-th rows after the keys, and where each of them begins."""
        rows = _Rows(self.b, *cgutils.unpack_tuple(self.b, self.arguments[i]))
        return rows, [rows.row(ir.Constant(I64, h)) for h in range(self.n_heads)]

    def each_vector(self, body: Callable[[Any, list[Any]], None]) -> None:
        """body(number of a vector's first element, that vector of each key)."""
        n = self.b.udiv(self.depth, ir.Constant(I64, LANES))
        with cgutils.for_range(self.b, n) as loop:
            self._fetch(loop.index)
            element = self.b.mul(loop.index, ir.Constant(I64, LANES))
            body(element, [self.keys.floats(row, element) for row in self.key_rows])

    def _fetch(self, i: Any) -> None:
        """Ask for a part of a later tile: the CPU itself sees too late what comes.

        After the last rows comes what is read after them."""
        n_bytes = KEYS * self.keys.width
        start = self.b.add(self.ahead, self.b.mul(i, I64(n_bytes)))
        beyond = self.b.sub(start, self.stop)
        is_inside = self.b.icmp_signed("<", beyond, I64(0))
        start = self.b.select(is_inside, start, self.b.add(self.after, beyond))
        for offset in range(0, n_bytes, _LINE):
            line = self.b.add(start, I64(offset))
            prefetch(self.b, self.b.inttoptr(line, I8.as_pointer()))


@intrinsic(prefer_literal=True)
def score_tile(typing: Any, n_heads: Any, k: Any, keys: Any, scores: Any, q: Any) -> Any:
    """scores[h, j] = q[h]·k[key j] for KEYS keys of k (S, HK, D) and n_heads heads, a constant.

    keys: Keys; scores, q: HeadRows.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tile = _Tile(context, builder, signature, arguments)
        (scores, score_rows), (queries, q_rows) = tile.rows(0), tile.rows(1)
        chains = zeros(builder, _FLOATS, len(q_rows), KEYS)

        def add(element: Any, vectors: list[Any]) -> None:
            for row, own in zip(q_rows, chains, strict=True):
                numbers = queries.floats(row, element)
                for key, chain in zip(vectors, own, strict=True):
                    builder.store(fma(builder, numbers, key, builder.load(chain)), chain)

        tile.each_vector(add)
        for row, own in zip(score_rows, chains, strict=True):
            sums = totals(builder, [builder.load(chain) for chain in own])
            store(builder, sums, scores.at(row, ir.Constant(I64, 0)))
        return context.get_dummy_value()

    return types.void(n_heads, k, keys, scores, q), codegen


@intrinsic(prefer_literal=True)
def value_tile(typing: Any, n_heads: Any, v: Any, keys: Any, sums: Any, weights: Any) -> Any:
    """sums[h] += Σ_j weights[h, j] · v[key j], likewise."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tile = _Tile(context, builder, signature, arguments)
        (sums, sum_rows), (weights, w_rows) = tile.rows(0), tile.rows(1)
        numbers = [ir.Constant(I64, j) for j in range(KEYS)]
        factors = [
            [broadcast(builder, builder.load(weights.at(row, j)), _FLOATS) for j in numbers]
            for row in w_rows
        ]

        def add(element: Any, values: list[Any]) -> None:
            for row, own in zip(sum_rows, factors, strict=True):
                total = sums.floats(row, element)
                for value, factor in zip(values, own, strict=True):
                    total = fma(builder, value, factor, total)
                store(builder, total, sums.at(row, element))

        tile.each_vector(add)
        return context.get_dummy_value()

    return types.void(n_heads, v, keys, sums, weights), codegen


def _number_at(typing: Any, row: Any, i: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.ptrtoint(array.data, I64)
        rows = _KINDS[signature.args[0].dtype](builder, address, None)
        return rows.number(address, arguments[1])

    return types.float32(row, types.intp), codegen


def _number_of(row: np.ndarray, i: int) -> np.float32:
    """Without the JIT, where float16 is float16."""
    if row.dtype != np.uint8:
        return np.float32(row[i])
    block = row[i // 32 * 34 :][:34]
    return np.float32(block[:2].view(np.float16)[0]) * np.float32(block.view(np.int8)[2 + i % 32])


# Number i of a key or value, a row of one of the three types.
number_at: Any = intrinsic(_number_at) if JIT else _number_of
