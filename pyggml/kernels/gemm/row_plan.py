"""How a type's rows are multiplied in bytes: which weights meet in a vector, in which order.

A unit is n_blocks neighbouring blocks: 256 weights, or one block where a row has fewer left. Its
weights are cut in pieces that lie together in the file, and 64 of them, from several pieces, make
one vector of bytes. Any order will do, as x is laid in the same order once. So the cheapest is
taken: that of the fewest instructions, found by emitting all.

CPUs multiply unsigned bytes by signed ones, or (NEON) small ones. Weights are u − zero, u unsigned;
zero times Σ x is subtracted with the scales. u is at most MOST_UNSIGNED; types with more values
stay signed.

Fields of bits need not be shifted to bit 0: 16 q with a 16th of the scale is as good.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations
from typing import Any, NamedTuple

from llvmlite import ir

from pyggml.graph.dtypes import DType, dtype
from pyggml.jit.isa import CHOSEN
from pyggml.jit.llvm import I64, MOST_UNSIGNED
from pyggml.quants.layout import GROUP, SUBGROUP
from pyggml.quants.readers.pieces import (
    Node,
    Piece,
    PieceBlock,
    is_fields,
    n_shifts,
    span,
    times_power,
)
from pyggml.quants.unpack import LAYOUTS

UNIT = 256  # weights of a unit, if the row has as many
# Bytes of a vector. With NEON's 16 those of a group have one scale, and one sum of integers.
VECTOR = 16 if CHOSEN.neon else 64
_LANE = 4  # bytes whose products one lane sums
_JOINT = 4  # instructions that a vector of sums takes on its way to the row's


class RowPlan(NamedTuple):
    """The order of a unit's weights.

    pieces     of the weights in order
    within     the order of the weights of each group in its pieces
    size       weights of a piece
    vectors    the numbers of the pieces of each vector; vectors one after the other
    sums       numbers of vectors whose sums have the same scales, summed as integers
    zero       weights are u − zero
    signed     weights are signed, and zero is 0
    factors    of each SUBGROUP: u is weights + zero by this factor's inverse
    n_minima   of a unit
    one_scale  each GROUP has one, not two
    """

    pieces: tuple[Piece, ...]
    within: tuple[int, ...]
    size: int
    vectors: tuple[tuple[int, ...], ...]
    sums: tuple[tuple[int, ...], ...]
    zero: int
    signed: bool
    factors: tuple[float, ...]
    n_minima: int
    one_scale: bool

    @property
    def of_group(self) -> int:
        """Scales of a GROUP: two, if the weights have two or are moved by two numbers."""
        first, second = self.factors[::2], self.factors[1::2]
        return 1 if self.one_scale and first == second else 2

    def lanes(self, vector: int) -> list[int]:
        """The number of the scale that each lane of a vector's sums has."""
        firsts = (piece * self.size for piece in self.vectors[vector])
        weights = GROUP // self.of_group  # of a scale
        return [(first + at) // weights for first in firsts for at in range(0, self.size, _LANE)]


def units(kind: DType, depth: int) -> list[tuple[int, int]]:
    """(blocks of a unit, units of that size) of a row, one size after the other."""
    most = max(1, UNIT // kind.block)
    left = depth % (most * kind.block) // kind.block
    return [(n, count) for n, count in ((most, depth // (most * kind.block)), (1, left)) if count]


@lru_cache
def plan(name: str, n_blocks: int) -> RowPlan:
    """The cheapest order for units of so many blocks of a type."""
    return min(_plans(name, n_blocks), key=lambda p: _cost(name, n_blocks, p))


def _builder() -> Any:
    """A builder whose code is only counted."""
    function = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), [I64]), "counted")
    return ir.IRBuilder(function.append_basic_block())


def decode(builder: Any, source: Any, name: str, n_blocks: int) -> PieceBlock:
    """The blocks of a unit as their decoder writes them down."""
    block = PieceBlock(builder, source, n_blocks, dtype(name).block_bytes)
    LAYOUTS[name](block)
    return block


@lru_cache
def whole_range(name: str) -> tuple[int, int, bool]:
    """zero and the largest u of a type's weights u − zero, and whether each 32 have one scale."""
    builder = _builder()
    block = decode(builder, builder.function.args[0], name, 1)
    _, zeros, spans = zip(*(_as_unsigned(node) for _, node in block.weight_pieces()), strict=True)
    return max(zeros), max(spans), block.has_one_scale


def unsigned_range(name: str) -> tuple[int, int] | None:
    """zero and the largest u of a type's weights u − zero; None if 32 may have several scales."""
    zero, most, has_one_scale = whole_range(name)
    return (zero, most) if has_one_scale else None


def _plans(name: str, n_blocks: int) -> Iterator[RowPlan]:
    """All orders in which some digits of a piece's number choose its place in a vector, the others
    the vector; with fields shifted to bit 0, or not."""
    builder = _builder()
    block = decode(builder, builder.function.args[0], name, n_blocks)
    pieces = block.weight_pieces()
    size = pieces[0][1].n
    unsigned, zeros, spans = zip(*(_as_unsigned(node) for _, node in pieces), strict=True)
    signed, zero = max(spans) > MOST_UNSIGNED or _is_signed(pieces), max(zeros)
    nodes = [(n, node) for (n, _), node in zip(pieces, unsigned, strict=True)]
    n_minima = 0 if block.minima is None else block.minima.type.count
    inside = min(VECTOR // size, len(pieces))
    for vectors in _orders(len(pieces), inside):
        for by in {0, *(() if signed else _moves(unsigned))}:
            moves = [_move(node) if by else 0 for node in unsigned]
            factors = _factors(moves, size)
            if factors is None:
                continue
            each = pieces if signed else [
                (n, times_power(node, m) if m else node)
                for (n, node), m in zip(nodes, moves, strict=True)
            ]  # fmt: skip
            start = RowPlan(
                tuple(each), block.within, size, vectors, (), 0 if signed else zero, signed,
                factors, n_minima, block.has_one_scale,
            )  # fmt: skip
            yield start._replace(sums=_sums(start))


def _orders(n: int, inside: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """n pieces, 2^k, to vectors of `inside`, 2^i."""
    digits, n_digits = range(n.bit_length() - 1), inside.bit_length() - 1
    for chosen in combinations(digits, n_digits):
        remaining = [digit for digit in digits if digit not in chosen]
        yield tuple(
            tuple(_number(vector, remaining) + _number(place, chosen) for place in range(inside))
            for vector in range(n // inside)
        )


def _number(bits: int, digits: Any) -> int:
    """The number with these bits at these digits."""
    return sum((bits >> i & 1) << digit for i, digit in enumerate(digits))


def _is_signed(pieces: list[Piece]) -> bool:
    """Whether pieces are multiplied as they are: NEON takes them, and to make one of them unsigned
    would be more than to leave out what is subtracted."""
    return CHOSEN.neon and any(node.op != "minus" and span(node)[0] < 0 for _, node in pieces)


def _as_unsigned(node: Node) -> tuple[Node, int, int]:
    """u and zero of a piece's weights, and the largest u."""
    low, high = span(node)
    if node.op == "minus" and span(node.of[0])[0] == 0:
        return node.of[0], node.at[0], high - low
    if node.op == "lookup":
        return node._replace(at=tuple(v - low for v in node.at)), -low, high - low
    if low < 0:
        return Node("minus", node.n, (node,), (low,)), -low, high - low
    return node, 0, high


def _moves(nodes: Any) -> set[int]:
    return {_move(node) for node in nodes}


def _move(node: Node) -> int:
    """How far to the left a piece's fields are best left."""
    if not is_fields(node):
        return 0
    room = range(8)
    fits = [n for n in room if span(node)[1] << n <= MOST_UNSIGNED]
    return min(fits, key=lambda n: n_shifts(times_power(node, n)))


def _factors(moves: list[int], size: int) -> tuple[float, ...] | None:
    """Of each SUBGROUP; None if its pieces are moved by different numbers."""
    each = [moves[i : i + SUBGROUP // size] for i in range(0, len(moves), SUBGROUP // size)]
    alike = all(len({*subgroup}) == 1 for subgroup in each)
    return tuple(2.0 ** -m[0] for m in each) if alike else None


def _sums(p: RowPlan) -> tuple[tuple[int, ...], ...]:
    """The vectors whose lanes have the same scales, together."""
    together: dict[tuple[int, ...], list[int]] = {}
    for i in range(len(p.vectors)):
        together.setdefault(tuple(p.lanes(i)), []).append(i)
    return tuple(tuple(indices) for indices in together.values())


def _cost(name: str, n_blocks: int, p: RowPlan) -> int:
    """Instructions of a unit."""
    builder = _builder()
    block = decode(builder, builder.function.args[0], name, n_blocks)
    before = len(builder.block.instructions)
    for vector in p.vectors:
        block.wide(p.pieces[piece] for piece in vector)
    return len(builder.block.instructions) - before + _JOINT * len(p.sums)
