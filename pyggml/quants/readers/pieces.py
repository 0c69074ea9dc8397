"""Decoders run once for neighbouring blocks, for products of one row: 64 weights in one vector.

The weights' bytes are not read at once. `PieceBlock` writes down what each group's bytes are, as a
`Node`; `cut` takes a piece of it. Whoever multiplies lays the pieces of all blocks in any order
(pyggml.kernels.gemm.row_plan), four or more to a vector of bytes, and `wide` emits a vector's code:
one load where pieces are neighbours in the file, one shift where they are shifted alike.

Ints and floats are LLVM vectors of n_blocks · n lanes, those of a block side by side. So all scales
of the blocks are decoded in one vector.
"""

from collections.abc import Sequence
from functools import reduce
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from pyggml.jit.isa import CHOSEN
from pyggml.jit.llvm import (
    F32,
    I8,
    I16,
    I32,
    I64,
    concatenate,
    declare_intrinsic,
    every,
    shuffle,
    where_set,
)
from pyggml.quants.layout import GROUP, SUBGROUP, ByteTable
from pyggml.quants.readers.vectors import VectorBlock, lane_of, table_pointer

_ANY_BYTE = -128, 127


class Node(NamedTuple):
    """n bytes of a block: an operation, what it is applied to, and its constants."""

    op: str
    n: int
    of: tuple["Node", ...] = ()
    at: tuple[Any, ...] = ()


class Lane(NamedTuple):
    """One lane of several floats of a block."""

    numbers: Any
    i: int


class Added(NamedTuple):
    """GROUP weights: scales of the first and of the second SUBGROUP, q, the first one's index."""

    scales: tuple[Any, Any]
    q: Node
    i: int


def grain(node: Node) -> int:
    """The most bytes of a piece, so that none lies in both parts of a `join`."""
    if node.op == "join":
        return gcd(node.of[0].n, *map(grain, node.of))
    return gcd(node.n, SUBGROUP, *map(grain, node.of))


def cut(node: Node, first: int, n: int) -> Node:
    """Bytes first … first + n − 1 of a node."""
    if node.op == "join":
        size = node.of[0].n
        return cut(node.of[0], first, n) if first < size else cut(node.of[1], first - size, n)
    if not node.of:  # a reader of neighbours: its first constant is where they begin
        return node._replace(n=n, at=(node.at[0] + first, *node.at[1:]))
    return node._replace(n=n, of=tuple(cut(part, first, n) for part in node.of))


def span(node: Node) -> tuple[int, int]:
    """The least and the largest value of its bytes, as signed numbers."""
    op, at = node.op, node.at
    if op == "bits":
        return 0, (1 << at[1]) - 1 << at[2]
    if op == "either":
        return 0, sum(span(part)[1] for part in node.of)
    if op == "minus":
        low, high = span(node.of[0])
        return low - at[0], high - at[0]
    if op == "digits":
        return 0, 2
    if op == "flags":
        return 0, at[1]
    if op == "lookup":
        return min(at), max(at)
    if op == "points":
        return int(at[2].rows.min()), int(at[2].rows.max())
    if op == "negate":
        most = max(map(abs, span(node.of[0])))
        return -most, most
    return _ANY_BYTE


def times_power(node: Node, n: int) -> Node:
    """Fields of bits, times 2^n."""
    if node.op == "bits":
        first, count, to = node.at
        return node._replace(at=(first, count, to + n))
    return node._replace(of=tuple(times_power(part, n) for part in node.of))


def n_shifts(node: Node) -> int:
    """How many fields of bits are not where they are wanted."""
    if node.op == "bits":
        return int(node.at[0] != node.at[2])
    return sum(map(n_shifts, node.of))


def is_fields(node: Node) -> bool:
    """Whether it is made of fields of bits alone."""
    return node.op == "bits" or (node.op == "either" and all(map(is_fields, node.of)))


Piece = tuple[int, Node]  # number of its block, what it is


class PieceBlock(VectorBlock):
    """n_blocks neighbouring blocks at an address; collects `added`, and minima if there are any.

    within   the order of the weights of a group in which pieces hold them
    """

    def __init__(self, builder: Any, source: Any, n_blocks: int, block_bytes: int) -> None:
        super().__init__(builder, source)
        self.n_blocks, self._block_bytes = n_blocks, block_bytes
        self.added: list[Added] = []
        self.minima: Any = None  # of each GROUP or SUBGROUP of all blocks
        self.within: tuple[int, ...] = (*range(GROUP),)
        self._indices: list[Any] = []
        self._emitted: dict[Any, Any] = {}

    # -- bytes, written down --------------------------------------------------------------------

    def bytes(self, offset: int, n: int = GROUP) -> Any:
        return Node("load", n, at=(offset,))

    def flags(self, offset: int, value: int) -> Any:
        return Node("flags", GROUP, at=(8 * offset, value))

    def pairs(self, offset: int) -> Any:
        """Weights 4j + k are fields k of 8 bytes j: in the order of k, they are shifted alike."""
        self.within = tuple(4 * j + k for j4 in (0, 4) for k in range(4) for j in range(j4, j4 + 4))
        fours = [self.bits(self.bytes(offset + j, 4), 2 * k, 2) for j in (0, 4) for k in range(4)]
        return reduce(self.join, (reduce(self.join, fours[i : i + 4]) for i in (0, 4)))

    def bits(self, whole: Any, first: int, n: int, to: int = 0) -> Any:
        if isinstance(whole, Node):
            return Node("bits", whole.n, (whole,), (first, n, to))
        return super().bits(whole, first, n, to)

    def either(self, a: Any, b: Any) -> Any:
        if isinstance(a, Node):
            return Node("either", a.n, (a, b))
        return self.b.or_(a, self._spread(b, a.type.count))

    def join(self, a: Any, b: Any) -> Any:
        if isinstance(a, Node):
            return Node("join", a.n + b.n, (a, b))
        n = a.type.count // self.n_blocks
        both = np.arange(2 * a.type.count).reshape(2, self.n_blocks, n).swapaxes(0, 1)
        return shuffle(self.b, both.ravel(), a, b)

    def minus(self, whole: Any, n: int) -> Any:
        if isinstance(whole, Node):
            return Node("minus", whole.n, (whole,), (n,))
        return super().minus(whole, n)

    def digits(self, whole: Any, i: int) -> Any:
        return Node("digits", whole.n, (whole,), (i,))

    def negate(self, whole: Any, where: Any) -> Any:
        return Node("negate", whole.n, (whole, where))

    def lookup(self, nibbles: Any, table: Sequence[int]) -> Any:
        return Node("lookup", nibbles.n, (nibbles,), tuple(table))

    def points(self, indices: Any, table: ByteTable) -> Any:
        self._indices.append(indices)
        return Node("points", GROUP, at=(0, len(self._indices) - 1, table))

    # -- ints and floats of all blocks ------------------------------------------------------------

    def _spread(self, one: Any, count: int) -> Any:
        """A number of each block, in each of the block's lanes of a vector of `count`."""
        if one.type.count == count:
            return one
        return shuffle(self.b, np.arange(count) // (count // self.n_blocks), one)

    def _each(self, offset: int, kind: Any) -> Any:
        """A number of each block, at the same place."""
        numbers = ir.Constant(ir.VectorType(kind, self.n_blocks), ir.Undefined)
        for block in range(self.n_blocks):
            number = self._number(offset + block * self._block_bytes, kind)
            numbers = self.b.insert_element(numbers, number, ir.Constant(I32, block))
        return numbers

    def _number(self, offset: int, kind: Any) -> Any:
        return (
            self._word(offset) if kind == I16 and self.n_blocks == 1 else self._read(offset, kind)
        )

    def fields(self, offset: int, n_bytes: int, n_bits: int, n: int | None = None) -> Any:
        if CHOSEN.neon and n_bits == 8 and self.n_blocks == 1 and n is None and n_bytes > 1:
            whole = self._read(offset, ir.VectorType(I8, n_bytes))
            return self.b.zext(whole, ir.VectorType(I32, n_bytes))
        if n_bytes > 4:
            return self.join(*(self.fields(offset + at, 4, n_bits) for at in (0, 4)))
        words = self._each(offset, ir.IntType(8 * n_bytes))
        if n_bytes < 4:
            words = self.b.zext(words, ir.VectorType(I32, self.n_blocks))
        shifts = [*range(0, 8 * n_bytes, n_bits)][:n]
        words = self._spread(words, self.n_blocks * len(shifts))
        shifted = self.b.lshr(words, ir.Constant(words.type, self.n_blocks * shifts))
        return self.b.and_(shifted, every(words.type, (1 << n_bits) - 1))

    def f16(self, offset: int, n: int = 1) -> Any:
        return self._from_f16(self._each(offset, I16))

    def half_e8m0(self, offset: int) -> Any:
        ints = ir.VectorType(I32, self.n_blocks)
        return self._half_power(self.b.zext(self._each(offset, I8), ints))

    def constant(self, value: float) -> Any:
        return every(ir.VectorType(F32, self.n_blocks), value)

    def floats(self, whole: Any) -> Any:
        return super().floats(self._now(whole) if isinstance(whole, Node) else whole)

    def times(self, floats: Any, factor: Any) -> Any:
        return self.b.fmul(floats, self._spread(factor, floats.type.count))

    def lane(self, numbers: Any, i: int) -> Any:
        if numbers.type.element == F32:
            return Lane(numbers, i)
        n = numbers.type.count // self.n_blocks
        return shuffle(self.b, np.arange(self.n_blocks) * n + i, numbers)

    # -- what is added ----------------------------------------------------------------------------

    def add_minima(self, minima: Any) -> None:
        self.minima = minima

    def add_two(self, scales: tuple[Any, Any], q: Any, i: int, most: int) -> None:
        self.added.append(Added(scales, q, i))

    def weight_pieces(self) -> list[Piece]:
        """The weights of all blocks in order (but for `within`), in pieces of equal size."""
        n = min(grain(added.q) for added in self.added)
        return [
            (block, cut(added.q, first, n))
            for block in range(self.n_blocks)
            for added in self.added
            for first in range(0, GROUP, n)
        ]

    @property
    def has_one_scale(self) -> bool:
        """Whether each GROUP has one."""
        return all(added.scales[0] is added.scales[1] for added in self.added)

    def scales(self, n: int) -> Any:
        """The scales of all blocks, one or two of each GROUP, one vector."""
        refs = [self._ref(scale, block) for block in range(self.n_blocks)
                for added in self.added for scale in added.scales[:n]]  # fmt: skip
        vectors = {id(numbers): numbers for numbers, _ in refs}
        if len(vectors) == 1:
            return shuffle(self.b, (lane for _, lane in refs), refs[0][0])
        vector = ir.Constant(ir.VectorType(F32, len(refs)), ir.Undefined)
        for i, (numbers, lane) in enumerate(refs):
            one = self.b.extract_element(numbers, ir.Constant(I32, lane))
            vector = self.b.insert_element(vector, one, ir.Constant(I32, i))
        return vector

    def _ref(self, scale: Any, block: int) -> tuple[Any, int]:
        """Where a block's scale is: a vector and a lane."""
        if isinstance(scale, Lane):
            return scale.numbers, block * (scale.numbers.type.count // self.n_blocks) + scale.i
        return scale, block

    # -- the code of a vector of bytes ----------------------------------------------------------

    def _now(self, node: Node) -> Any:
        """The bytes of all blocks."""
        n = grain(node)
        return self.wide(
            (block, cut(node, first, n))
            for block in range(self.n_blocks)
            for first in range(0, node.n, n)
        )

    def wide(self, pieces: Any) -> Any:
        """Pieces of equal size, 2^k of them, one after the other."""
        group = tuple(pieces)
        if group not in self._emitted:
            self._emitted[group] = self._wide(group)
        return self._emitted[group]

    def _wide(self, group: tuple[Piece, ...]) -> Any:
        ops = {node.op for _, node in group}
        if len(ops) == 1 and (ops <= _ELEMENTWISE or len(group) == 1 or self._together(group)):
            emit = getattr(self, f"_emit_{group[0][1].op}")
            parts = zip(*(node.of for _, node in group), strict=True)
            of = [
                self.wide((block, part) for (block, _), part in zip(group, each, strict=True))
                for each in parts
            ]
            return emit(group, *of)
        halves = [self.wide(part) for part in (group[: len(group) // 2], group[len(group) // 2 :])]
        return concatenate(self.b, halves)

    def _starts(self, group: tuple[Piece, ...], of_block: int) -> list[int]:
        return [block * of_block + node.at[0] for block, node in group]

    def _together(self, group: tuple[Piece, ...]) -> bool:
        """Whether they are read at once: neighbours in the file, or flags and points, which are
        joined otherwise."""
        n, starts = group[0][1].n, self._starts(group, self._block_bytes)
        is_load = group[0][1].op == "load"
        return not is_load or starts == [*range(starts[0], starts[0] + n * len(group), n)]

    def _emit_load(self, group: tuple[Piece, ...]) -> Any:
        start = self._starts(group, self._block_bytes)[0]
        return self._read(start, ir.VectorType(I8, group[0][1].n * len(group)))

    def _emit_flags(self, group: tuple[Piece, ...]) -> Any:
        bits = self._word_of_bits(self._starts(group, 8 * self._block_bytes), group[0][1].n)
        return where_set(self.b, bits, group[0][1].at[1])

    def _word_of_bits(self, starts: list[int], n: int) -> Any:
        """n bits from each start, one after the other, as an integer."""
        n_bits = n * len(starts)
        if starts == [*range(starts[0], starts[0] + n_bits, n)] and not starts[0] % 8 and n >= 8:
            return self._read(starts[0] // 8, ir.IntType(n_bits))
        if len(starts) == 1:  # a part of a byte
            byte = self.b.lshr(self._read(starts[0] // 8, I8), ir.Constant(I8, starts[0] % 8))
            return self.b.trunc(byte, ir.IntType(n))
        kind, half = ir.IntType(n_bits), len(starts) // 2
        low, high = (
            self.b.zext(self._word_of_bits(part, n), kind)
            for part in (starts[:half], starts[half:])
        )
        return self.b.or_(low, self.b.shl(high, ir.Constant(kind, n_bits // 2)))

    def _emit_points(self, group: tuple[Piece, ...]) -> Any:
        table, n = group[0][1].at[2], group[0][1].n
        row = ir.IntType(8 * table.width)
        rows = ir.VectorType(row, n * len(group) // table.width)
        start = table_pointer(self.b, table)
        points = ir.Constant(rows, ir.Undefined)
        for i in range(rows.count):
            block, node = group[i * table.width // n]
            indices = self._indices[node.at[1]]
            lane = block * (indices.type.count // self.n_blocks) + node.at[0] // table.width
            lane += i % max(1, n // table.width)
            index = self.b.zext(lane_of(self.b, indices, lane), I64)
            here = self.b.gep(start, [self.b.mul(index, ir.Constant(I64, table.width))])
            one = self.b.load(self.b.bitcast(here, row.as_pointer()))
            one.align = table.width
            points = self.b.insert_element(points, one, ir.Constant(I32, i))
        return self.b.bitcast(points, ir.VectorType(I8, n * len(group)))

    def _emit_bits(self, group: tuple[Piece, ...], whole: Any) -> Any:
        size = group[0][1].n
        amounts = [node.at[0] - node.at[2] for _, node in group]  # to the right
        masks = [((1 << node.at[1]) - 1) << node.at[2] for _, node in group]
        if len(masks) == 1 or masks[0] != 255 or any(amounts):
            mask = ir.Constant(whole.type, [m for m in masks for _ in range(size)])
            return self.b.and_(self._shift(whole, amounts), mask)
        return whole

    def _shift(self, whole: Any, amounts: list[int]) -> Any:
        """Bytes, each piece shifted to the right by its amount, in wider words: bits of neighbours
        come in."""
        b, n = self.b, whole.type.count
        if not any(amounts):
            return whole
        size = 16 if len({*amounts}) == 1 else 8 * min(8, n // len(amounts))
        if CHOSEN.neon and min(amounts) * max(amounts) >= 0:  # it shifts bytes too
            size = 8
        words = ir.VectorType(ir.IntType(size), 8 * n // size)
        each = [amounts[i * size // 8 * len(amounts) // n] for i in range(words.count)]
        v = b.bitcast(whole, words)
        if min(each) >= 0:
            v = b.lshr(v, ir.Constant(words, each))
        elif max(each) <= 0:
            v = b.shl(v, ir.Constant(words, [-amount for amount in each]))
        else:  # they turn
            name = f"llvm.fshr.v{words.count}i{size}"
            turn = declare_intrinsic(b, name, words, [words] * 3)
            v = b.call(turn, [v, v, ir.Constant(words, [amount % size for amount in each])])
        return b.bitcast(v, whole.type)

    def _emit_either(self, group: tuple[Piece, ...], one: Any, other: Any) -> Any:
        return self.b.or_(one, other)

    def _emit_minus(self, group: tuple[Piece, ...], whole: Any) -> Any:
        return self.b.sub(whole, every(whole.type, group[0][1].at[0]))

    def _emit_digits(self, group: tuple[Piece, ...], whole: Any) -> Any:
        size = group[0][1].n
        powers = [3 ** node.at[0] % 256 for _, node in group for _ in range(size)]
        return super().digits(self.b.mul(whole, ir.Constant(whole.type, powers)), 0)

    def _emit_negate(self, group: tuple[Piece, ...], whole: Any, where: Any) -> Any:
        return super().negate(whole, where)

    def _emit_lookup(self, group: tuple[Piece, ...], nibbles: Any) -> Any:
        return super().lookup(nibbles, group[0][1].at)


_ELEMENTWISE = {"bits", "either", "minus", "digits", "negate", "lookup"}
