"""LLVM code of the tile of products with weights of few bits. What it multiplies is packed, and why
so is said, in pyggml.kernels.gemm.few_bits_pack."""

from functools import partial
from typing import Any

from llvmlite import ir

from pyggml.jit import cgutils, instruction
from pyggml.jit.llvm import (
    I32,
    I64,
    at,
    broadcast,
    every,
    fma,
    in_order,
    load,
    prefetch,
    sixteen_bit_sums,
)
from pyggml.kernels.gemm.activations import BLOCK_WORDS
from pyggml.kernels.gemm.few_bits_pack import (
    BYTES,
    INTS,
    LANES,
    MR,
    NUMBERS,
    PAIRS,
    PANEL,
    TERMS,
    addresses,
    pair_products,
    terms_of,
)
from pyggml.kernels.gemm.microkernel import put_tile, tile_at, zeros
from pyggml.kernels.gemm.tile import BYTE_TILE

# Where each four numbers of a block lie once they are packed from 32 bits to 16, and then to 8:
# both take two registers in turns, half by half.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@instruction(addresses)
def product_of_columns(
    builder: Any, a: Any, scales: Any, firsts: Any, b: Any, starts: Any, c: Any, ldc: Any, n: Any,
    together: Any, accumulate: Any,
) -> None:  # fmt: skip
    """C (MR, PANEL) (+)= firsts + Σ over n blocks of scale · (start + Σ a·b); addresses.

    a, scales, firsts   as `scale_rows` makes them
    b, starts   (n, BLOCK_WORDS, PANEL) and (n, PANEL), as `put_columns` makes them
    c           rows ldc floats apart, overwritten unless accumulate is not 0
    together    words whose products are summed in 16 bits, as `centre` says
    """
    to = _targets(builder, c, ldc)
    firsts_at = (at(builder, firsts, ir.Constant(I64, m)) for m in range(MR))
    rows = (broadcast(builder, builder.load(p), NUMBERS) for p in firsts_at)
    cells = [cgutils.alloca_once_value(builder, row) for row in rows]
    emits = {n_words: partial(_add_columns, n_words) for n_words in (8, 4, 2)}
    _for_each_block(builder, together, n, emits, cells, a, b, scales, starts)
    put_tile(builder, [builder.load(cell) for cell in cells], to, accumulate)


@instruction(addresses)
def product_of_rows(
    builder: Any, a: Any, a_terms: Any, b: Any, terms: Any, c: Any, ldc: Any, n: Any, together: Any,
    accumulate: Any,
) -> None:  # fmt: skip
    """C (MR, PANEL) (+)= Σ over n blocks of scale_a · Σ scale · (start + Σ a·b) + total · minimum;
    addresses.

    a, a_terms   as `round_to_bytes` makes them, moved where a block has two scales
    b, terms     (n, BLOCK_WORDS, PANEL) words of q, and (n, TERMS, PANEL), or half as many terms
    c            rows ldc floats apart, overwritten unless accumulate is not 0
    together     words whose products are summed in 16 bits; 2 where a block has two scales
    """
    to = _targets(builder, c, ldc)
    cells = zeros(builder, NUMBERS, MR)
    emits = {8: partial(_add_rows, 8), 4: partial(_add_rows, 4), 2: _add_rows_of_two}
    _for_each_block(builder, together, n, emits, cells, a, b, a_terms, terms)
    put_tile(builder, [builder.load(cell) for cell in cells], to, accumulate)


def _for_each_block(
    builder: Any, together: Any, n: Any, emits: dict[int, Any], cells: list[Any], *arrays: Any
) -> None:
    """n times emits[together](builder, number of the block, cells, *arrays)."""
    after = builder.append_basic_block("after")
    blocks = {words: builder.append_basic_block(f"words{words}") for words in emits}
    choice = builder.switch(together, blocks[8])
    for words, block in blocks.items():
        if words < 8:
            choice.add_case(together.type(words), block)
        builder.position_at_end(block)
        with cgutils.for_range(builder, n) as loop:
            emits[words](builder, loop.index, cells, *arrays)
        builder.branch(after)
    builder.position_at_end(after)


def _targets(builder: Any, c: Any, ldc: Any) -> list[Any]:
    """The rows of C, which are prefetched."""
    to = tile_at(builder, c, ldc, BYTE_TILE)
    for target in to:
        prefetch(builder, target, first=True)
    return to


def _whole_sums(
    together: int, builder: Any, i: Any, start: Any, a: Any, b: Any, factors: list[Any]
) -> list[Any]:
    """start + Σ a·b of block i, for each row of the tile; with factors of 16 bits, of equal parts
    of the block's words. Without a start b is what is unsigned."""
    a_at, b_at = (builder.mul(i, ir.Constant(I64, BLOCK_WORDS * n)) for n in (MR, PANEL))
    sums, few = [start or every(INTS, 0)] * MR, [None] * MR  # the latter of 16 bits
    for k in range(BLOCK_WORDS):
        q = builder.bitcast(load(builder, at(builder, b, b_at, k * PANEL), INTS), BYTES)
        for m in range(MR):
            word = at(builder, a, a_at, m * BLOCK_WORDS + _PLACES[k])
            word = builder.load(builder.bitcast(word, I32.as_pointer()))
            x = builder.bitcast(broadcast(builder, word, INTS), BYTES)
            few[m] = sixteen_bit_sums(builder, *((x, q) if start else (q, x)), few[m])
        if (k + 1) % together == 0:
            factor, pairs = factors[k * len(factors) // BLOCK_WORDS], zip(sums, few, strict=True)
            sums = [builder.add(old, pair_products(builder, new, factor)) for old, new in pairs]
            few = [None] * MR
            sums = sums if k + 1 == BLOCK_WORDS else in_order(builder, sums)
        else:
            few = in_order(builder, few)
    return sums


def _vector_at(builder: Any, base: Any, i: Any, n: int, which: int, kind: Any) -> Any:
    """Vector `which` of the n of block i."""
    return load(builder, at(builder, base, builder.mul(i, ir.Constant(I64, n)), which), kind)


def _of_row(builder: Any, base: Any, i: Any, n: int, which: int) -> Any:
    """Number `which` of the n of block i, in every lane."""
    word = at(builder, base, builder.mul(i, ir.Constant(I64, n)), which)
    return broadcast(builder, builder.load(word), NUMBERS)


def _add_columns(
    together: int, builder: Any, i: Any, cells: list[Any], a: Any, b: Any, scales: Any, starts: Any
) -> None:
    start = _vector_at(builder, starts, i, PANEL, 0, INTS)
    sums = _whole_sums(together, builder, i, start, a, b, [every(PAIRS, 1)])
    for m, (whole, cell) in enumerate(zip(sums, cells, strict=True)):
        floats, scale = builder.sitofp(whole, NUMBERS), _of_row(builder, scales, i, LANES, m)
        builder.store(fma(builder, floats, scale, builder.load(cell)), cell)


def _add_rows(
    together: int, builder: Any, i: Any, cells: list[Any], a: Any, b: Any, a_terms: Any, terms: Any
) -> None:
    sums = _whole_sums(together, builder, i, None, a, b, [every(PAIRS, 1)])
    scale, minimum = (
        _vector_at(builder, terms, i, TERMS // 2 * PANEL, j * PANEL, NUMBERS) for j in range(2)
    )
    for m, (whole, cell) in enumerate(zip(sums, cells, strict=True)):
        floats = builder.fmul(builder.sitofp(whole, NUMBERS), scale)
        of_row, total_ = (_of_row(builder, a_terms, i, 2 * LANES, m + j) for j in (0, LANES))
        value = fma(builder, floats, of_row, builder.load(cell))
        builder.store(fma(builder, minimum, total_, value), cell)


def _add_rows_of_two(
    builder: Any, i: Any, cells: list[Any], a: Any, b: Any, a_terms: Any, terms: Any
) -> None:
    """The same where a block has two scales."""
    kinds = INTS, NUMBERS, PAIRS, PAIRS
    start, unit, *scales = (
        load(builder, place, kind)
        for place, kind in zip(terms_of(builder, terms, i), kinds, strict=True)
    )
    sums = _whole_sums(2, builder, i, start, a, b, scales)
    for m, (whole, cell) in enumerate(zip(sums, cells, strict=True)):
        floats, of_row = builder.sitofp(whole, NUMBERS), _of_row(builder, a_terms, i, 2 * LANES, m)
        value = fma(builder, builder.fmul(floats, unit), of_row, builder.load(cell))
        builder.store(value, cell)
