"""Register-tiled code that Numba's own loops do not reach, as LLVM vector instructions.

make_tile_product      C (mr, panel) (+)= Σ_k a (k, mr) ⊗ b (k, panel), for a declared tile
make_strided_product   the same with a as it lies
make_dot_tile          out (mr, mr) = x (mr, k) · a (mr, k)ᵀ: neither operand needs packing
make_transpose         a lanes × lanes block of words: as they lie, or of two numbers each
make_spread            groups of words from a row to places further apart
call_block             calls a `block_code` function through its address
fetch                  has bytes brought near that are read soon

The vectors are LLVM's own types, so the same text becomes AVX-512, AVX2, NEON or SSE code; only the
tiles differ (pyggml.kernels.gemm.tile).
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from pyggml.jit import cgutils, instruction, types
from pyggml.jit.llvm import (
    F32,
    I8,
    I64,
    at,
    broadcast,
    fma,
    load,
    prefetch,
    shuffle,
    store,
    total,
)
from pyggml.kernels.gemm.tile import Tile


def make_tile_product(tile: Tile) -> Any:
    """The microkernel of a tile: (a, b, ldb, c, ldc, k, accumulate) -> None.

    a is (k, mr) without gaps, b is (k, panel) with rows ldb words apart, c is (mr, panel) with rows
    ldc floats apart; a, b, c are addresses, k counts words. C is overwritten unless accumulate is
    not 0.
    """

    @instruction(types.void(*(types.intp,) * 7))
    def tile_product(
        builder: Any, a: Any, b: Any, ldb: Any, c: Any, ldc: Any, k: Any, acc: Any
    ) -> None:
        operand = a, ir.Constant(I64, 1), ir.Constant(I64, tile.mr)
        _emit_tile_product(builder, operand, (b, ldb, c, ldc, k, acc), tile)

    return tile_product


def make_strided_product(tile: Tile) -> Any:
    """The same with a's steps from row to row and along k: (a, row_step, step, b, …) -> None."""

    @instruction(types.void(*(types.intp,) * 9))
    def strided_product(
        builder: Any, a: Any, row_step: Any, step: Any, b: Any, ldb: Any, c: Any, ldc: Any, k: Any,
        acc: Any,
    ) -> None:  # fmt: skip
        _emit_tile_product(builder, (a, row_step, step), (b, ldb, c, ldc, k, acc), tile)

    return strided_product


def _emit_tile_product(builder: Any, operand: Any, arguments: Any, tile: Tile) -> None:
    """operand is a and its steps from row to row and along k."""
    b, ldb, c, ldc, k, accumulate = arguments
    multiply = _emit_square_loop if tile.square else _emit_depth_loop
    sums = multiply(builder, operand, b, ldb, k, tile)
    put_tile(builder, [v for row in sums for v in row], tile_at(builder, c, ldc, tile), accumulate)


def tile_at(builder: Any, c: Any, ldc: Any, tile: Tile) -> list[Any]:
    """Where the vectors of a tile lie, row by row."""
    starts = [builder.mul(ldc, ir.Constant(I64, i)) for i in range(tile.mr)]
    return [at(builder, c, start, j * tile.lanes) for start in starts for j in range(tile.nv)]


def put_tile(builder: Any, sums: list[Any], to: list[Any], accumulate: Any) -> None:
    """Write sums, or add them unless accumulate is 0."""
    adds = builder.icmp_signed("!=", accumulate, accumulate.type(0))
    with builder.if_else(adds) as parts:
        for part, old in zip(parts, (True, False), strict=True):
            with part:
                for value, target in zip(sums, to, strict=True):
                    more = builder.fadd(load(builder, target, value.type), value) if old else value
                    store(builder, more, target)


def zeros(builder: Any, kind: Any, *shape: int) -> Any:
    """Variables of this shape, one or lists of them, that are 0; LLVM keeps them in registers."""
    if not shape:
        return cgutils.alloca_once_value(builder, ir.Constant(kind, None))
    return [zeros(builder, kind, *shape[1:]) for _ in range(shape[0])]


def _emit_depth_loop(
    builder: Any, operand: Any, b: Any, ldb: Any, k: Any, tile: Tile
) -> list[list[Any]]:
    """The loop over k with all sums in registers; returns them."""
    (a, row_step, a_step), vector = operand, ir.VectorType(F32, tile.lanes)
    cells, step_at = zeros(builder, vector, tile.mr, tile.nv), zeros(builder, I64)
    loop, after = (builder.append_basic_block(name) for name in ("depth", "after"))
    builder.branch(loop)  # k is 1 or more
    builder.position_at_end(loop)
    step = builder.load(step_at)
    b_row, a_start = builder.mul(step, ldb), builder.mul(step, a_step)
    places = [at(builder, b, b_row, j * tile.lanes) for j in range(tile.nv)]
    columns = [load(builder, place, vector) for place in places]
    for i, row in enumerate(cells):
        word = builder.add(a_start, builder.mul(row_step, ir.Constant(I64, i)))
        scalar = broadcast(builder, builder.load(at(builder, a, word)), vector)
        for column, cell in zip(columns, row, strict=True):
            builder.store(tile.inner(builder, scalar, column, builder.load(cell)), cell)
    following = builder.add(step, ir.Constant(I64, 1))
    builder.store(following, step_at)
    builder.cbranch(builder.icmp_signed("<", following, k), loop, after)
    builder.position_at_end(after)
    return [[builder.load(cell) for cell in row] for row in cells]


def _emit_square_loop(
    builder: Any, operand: Any, b: Any, ldb: Any, k: Any, tile: Tile
) -> list[list[Any]]:
    """The same by products of matrices: two words of two rows with two of two columns at a time.
    Rows of `operand` are neighbours, as `pack_pairs` packs them."""
    (a, _, a_step), square = operand, tile.square
    assert square is not None
    word, few = (ir.VectorType(F32, n) for n in (tile.lanes, tile.lanes // 2))
    cells = zeros(builder, word, tile.mr // 2, tile.panel // 2)
    with cgutils.for_range_slice(builder, k.type(0), k, k.type(2)) as (step, _):
        after = builder.add(step, ir.Constant(I64, 1))
        both = [builder.mul(at_word, ldb) for at_word in (step, after)]
        columns = [
            two
            for j in range(0, tile.panel, tile.lanes)
            for two in in_turns(
                builder, [load(builder, at(builder, b, row, j), word) for row in both]
            )
        ]
        starts = [builder.mul(at_word, a_step) for at_word in (step, after)]
        for i, row in enumerate(cells):
            words = [load(builder, at(builder, a, start, 2 * i), few) for start in starts]
            rows = in_turns(builder, words)[0]
            for column, cell in zip(columns, row, strict=True):
                builder.store(square(builder, rows, column, builder.load(cell)), cell)
    return rows_of_squares(builder, [[builder.load(cell) for cell in row] for row in cells])


def in_turns(builder: Any, words: list[Any]) -> list[Any]:
    """Two vectors of words, lane by lane in turns, in vectors of four; one as it is."""
    if len(words) == 1:
        return words
    n = words[0].type.count
    order = [x for i in range(n) for x in (i, n + i)]
    return [shuffle(builder, order[i : i + 4], *words) for i in range(0, 2 * n, 4)]


def rows_of_squares(builder: Any, squares: list[list[Any]]) -> list[list[Any]]:
    """Matrices (2, 2) of pairs of rows and of columns as rows of vectors of four columns."""
    halves = [(n, n + 1, n + 4, n + 5) for n in (0, 2)]
    return [
        [shuffle(builder, half, *two) for two in zip(row[::2], row[1::2], strict=True)]
        for row in squares
        for half in halves
    ]


def make_dot_tile(tile: Tile) -> Any:
    """(whole, out, x, ldx, a, lda, k) -> None: out[i, j] = Σ_k x[i, k] a[j, k], j < mr.

    i < mr where `whole`, else i is 0 alone; out has rows of mr; addresses; k in whole vectors.
    """
    vector, mr = ir.VectorType(F32, tile.lanes), tile.mr

    @instruction(types.void(types.boolean, *(types.intp,) * 6))
    def dot_tile(
        builder: Any, whole: Any, out: Any, x: Any, ldx: Any, a: Any, lda: Any, k: Any
    ) -> None:
        with builder.if_else(whole) as (many, one):
            with many:
                _emit_dot_tile(builder, (out, x, ldx, a, lda, k), mr, mr, vector)
            with one:
                _emit_dot_tile(builder, (out, x, ldx, a, lda, k), 1, mr, vector)

    return dot_tile


def _emit_dot_tile(builder: Any, arguments: Any, rows: int, mr: int, vector: Any) -> None:
    """`rows` rows of a dot tile."""
    out, x, ldx, a, lda, k = arguments
    sums = zeros(builder, vector, rows, mr)
    with cgutils.for_range_slice(builder, k.type(0), k, k.type(vector.count)) as (i, _):
        starts = [builder.add(i, builder.mul(lda, ir.Constant(I64, j))) for j in range(mr)]
        columns = [load(builder, at(builder, a, start), vector) for start in starts]
        for n, row in enumerate(sums):
            start = builder.add(i, builder.mul(ldx, ir.Constant(I64, n)))
            values = load(builder, at(builder, x, start), vector)
            for column, one in zip(columns, row, strict=True):
                builder.store(fma(builder, values, column, builder.load(one)), one)
    for n, row in enumerate(sums):
        for j, one in enumerate(row):
            value = total(builder, builder.load(one))
            store(builder, value, at(builder, out, ir.Constant(I64, n * mr + j)))


def make_transpose(lanes: int, words: Callable[..., Any] = load) -> Any:
    """(dst, ld_dst, src, ld_src) -> None: dst[j, i] = src[i, j] for a lanes × lanes block.

    words(builder, pointer, vector) are those of a row of src; rows lie ld_src floats apart.
    log2(lanes) rounds; each interleaves vector i with vector i + lanes/2 (a perfect shuffle).
    """

    @instruction(types.void(*(types.intp,) * 4))
    def transpose(builder: Any, to: Any, ld_to: Any, source: Any, ld_source: Any) -> None:
        vector, middle, rows = ir.VectorType(F32, lanes), lanes // 2, []
        in_turns = [x for i in range(lanes) for x in (i, i + lanes)]
        halves = in_turns[:lanes], in_turns[lanes:]
        for i in range(lanes):
            offset = builder.mul(ld_source, ir.Constant(I64, i))
            rows.append(words(builder, at(builder, source, offset), vector))
        for _ in range(lanes.bit_length() - 1):
            pairs = [(rows[i], rows[i + middle]) for i in range(middle)]
            rows = [shuffle(builder, half, *two) for two in pairs for half in halves]
        for i, row in enumerate(rows):
            store(builder, row, at(builder, to, builder.mul(ld_to, ir.Constant(I64, i))))

    return transpose


def make_spread(lanes: int, size: int) -> Any:
    """(to, of, apart, n) -> None: n groups of `size` words, `apart` from each other at `of`, to
    places without gaps, in this order. Whole vectors are written."""
    vector = ir.VectorType(F32, lanes)

    @instruction(types.void(*(types.intp,) * 4))
    def spread(builder: Any, to: Any, of: Any, apart: Any, n: Any) -> None:
        with cgutils.for_range(builder, n) as groups:
            source = builder.mul(groups.index, apart)
            target = builder.mul(groups.index, I64(size))
            for i in range(0, size, lanes):
                words = load(builder, at(builder, of, source, i), vector)
                store(builder, words, at(builder, to, target, i))

    return spread


@instruction(types.void(*(types.intp,) * 4))
def call_block(builder: Any, address: Any, dst: Any, src: Any, n_blocks: Any) -> None:
    """Call the `block_code` function at address `code` with two addresses and a count."""
    kind = ir.FunctionType(ir.VoidType(), [F32.as_pointer(), I8.as_pointer(), I64])
    function = builder.inttoptr(address, kind.as_pointer())
    d = builder.inttoptr(dst, F32.as_pointer())
    s = builder.inttoptr(src, I8.as_pointer())
    builder.call(function, [d, s, n_blocks])


@instruction(lambda f, *_: types.void(f, *(types.intp,) * 6))
def call_unpack(
    builder: Any, f: Any, code: Any, thread: Any, first: Any, n: Any, k0: Any, k: Any
) -> None:
    """Call code at this address that unpacks B (pyggml.kernels.gemm.frames)."""
    arguments = f, thread, first, n, k0, k
    kind = ir.FunctionType(ir.VoidType(), [x.type for x in arguments])
    builder.call(builder.inttoptr(code, kind.as_pointer()), arguments)


@instruction(lambda source, n_bytes: types.void(source, n_bytes))
def fetch(builder: Any, source: Any, n_bytes: Any) -> None:
    """Have n_bytes from this address on, which need not exist, brought near."""
    step = ir.Constant(I64, 64)
    with cgutils.for_range_slice(builder, step.type(0), n_bytes, step) as (i, _):
        line = builder.inttoptr(builder.add(source, i), I8.as_pointer())
        prefetch(builder, line)
