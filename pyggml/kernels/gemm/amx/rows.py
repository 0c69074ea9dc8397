"""Rows of bfloat16, as tiles take them: rounded from float32, or straight from packed weights.

A row is addressed in bytes. Rows are padded with zeros to whole steps of k: what lies beside a zero
must be finite.
"""

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir

from pyggml.graph.dtypes import BY_NUMBER, DType, dtype
from pyggml.jit import BlockCode, block_code, cgutils, instruction, kernel, types
from pyggml.jit.isa import CHOSEN
from pyggml.jit.llvm import F32, I16, I32, I64, at, every, load, store
from pyggml.jit.simd import fill
from pyggml.kernels.gemm.amx.tiles import SIDE, STEP, TILE_BYTES
from pyggml.kernels.gemm.bfloat16 import convert_bf16, make_pair, make_round, to_bf16
from pyggml.kernels.gemm.dots import step
from pyggml.kernels.gemm.frames import BlockMatrix, block_matrix, columns_from
from pyggml.kernels.gemm.microkernel import call_block, fetch, make_transpose
from pyggml.kernels.gemm.panels import rounded_up
from pyggml.quants import UNPACK
from pyggml.quants.readers.vectors import FloatsOut, emit_blocks
from pyggml.quants.unpack import LAYOUTS
from pyggml.sizes import round_up

LINE = 64  # bytes of a cache line; added to strides, which as powers of two would meet in few sets
PACKED_ROWS = 8  # of A that a task packs, a whole part of SIDE
LANES = 16  # rows of a tile, and 32-bit words of its rows
PIECE = 512  # numbers of a row that are unpacked at a time; a multiple of every block

COLUMN_WORDS = (LANES + 2) * SIDE  # a step of SIDE columns of pairs, and two columns at an edge

round_row, round_two = make_round(LANES, CHOSEN.tiles)
pair_two = make_pair(LANES)
transpose = make_transpose(LANES)  # (to, ld_to, of, ld_of) of 16 × 16 words
narrow = convert_bf16 if CHOSEN.tiles else to_bf16
_NUMBERS = ir.VectorType(I16, 2 * LANES)

# -- weights --------------------------------------------------------------------------------------


class _Rounded(FloatsOut):
    """Writes the weights as bfloat16."""

    def add_floats(self, floats: Any, i: int) -> None:
        store(self.b, narrow(self.b, floats), at(self.b, self._to, ir.Constant(I64, i // 2)))


@instruction(lambda to, source, n: types.void(to, source, n), n_constants=1)
def _unpack_rounded(builder: Any, number: int, to: Any, source: Any, n: Any) -> None:
    """n times `step` weights to bfloat16; number: their type's in ggml, a constant."""
    kind = BY_NUMBER[number]
    size = step(kind)
    sizes = size // kind.block * kind.block_bytes, 2 * size
    addresses = builder.ptrtoint(source, I64), builder.ptrtoint(to, I64)
    emit_blocks(builder, LAYOUTS[kind.name], n, addresses, sizes, partial(_Rounded, size=size))


def _unpacker(kind: DType) -> BlockCode:
    number = kind.number  # a closure of a number is kept from run to run, one of code is not

    def unpack(dst, src, n_blocks):
        _unpack_rounded(number, dst, src, n_blocks)

    return block_code(unpack)


_UNPACK = {name: _unpacker(dtype(name)) for name in LAYOUTS if name != "F32"}


def matrix(w: np.ndarray, kind: DType, row: int, rounds_w: bool) -> tuple[BlockMatrix, bool]:
    """W, with rows of so many numbers, and whether its unpacker writes bfloat16, not float32.
    rounds_w: of float32, which need none."""
    if rounds_w:
        return block_matrix(w, kind, 0), False
    code = _UNPACK.get(kind.name)
    if code is None or row % step(kind):
        return block_matrix(w, kind, UNPACK[kind.name].address), False
    n_bytes = step(kind) // kind.block * kind.block_bytes
    return BlockMatrix(w.ctypes.data, w.strides[0], code.address, step(kind), n_bytes), True


@kernel
def _unpack_row(row, w, i, n, rounds, numbers, ahead):
    """The first n numbers of W's row i as bfloat16, with zeros up to the next whole step; the same
    of the row `ahead` is fetched."""
    here, n_blocks = w.address + i * w.row_bytes, n // w.block
    fetch(here + ahead * w.row_bytes, n_blocks * w.block_bytes)
    if w.unpack == 0:  # n is whole steps
        round_row(row.ctypes.data, here, n)
        return
    if rounds:
        call_block(w.unpack, row.ctypes.data, here, n_blocks)
        return
    n_padded = rounded_up(n, STEP)
    call_block(w.unpack, numbers.ctypes.data, here, n_blocks)
    fill(numbers[n:n_padded], np.float32(0))
    round_row(row.ctypes.data, numbers.ctypes.data, n_padded)


@kernel
def unpack_rows(rows, w, first, n_rows, n, rounds, numbers):
    """Rows `first` … of W as bfloat16, n numbers of each; zeros from row n_rows on.

    rounds, as `matrix` says; numbers: room for n floats.
    """
    for i in range(rows.shape[0]):
        if first + i < n_rows:
            _unpack_row(rows[i], w, first + i, n, rounds, numbers, rows.shape[0])
        else:
            fill(rows[i], np.uint16(0))


# -- activations ----------------------------------------------------------------------------------


@kernel
def leading(k):
    """Numbers from row to row of A, packed: whole steps and a line."""
    return rounded_up(k, STEP) + LINE // 2


@kernel
def round_padded(to, x, spare):
    """x as bfloat16, with zeros up to the next whole step; `spare` holds one step's floats."""
    k = x.shape[0]
    steps = k // STEP * STEP
    round_row(to, x.ctypes.data, steps)
    if steps < k:
        tail = spare[:STEP]
        for i in range(STEP):
            tail[i] = x[steps + i] if steps + i < k else np.float32(0)
        round_row(to + 2 * steps, tail.ctypes.data, STEP)


@kernel
def pack_rows(packed, a, lda, is_narrow, m, k, task, spare):
    """Pack PACKED_ROWS rows of A (m, k), which lie `lda` words apart; after the last one zeros,
    up to a whole group."""
    ld, stop, shorts = leading(k), (task + 1) * PACKED_ROWS, a.view(np.uint16)
    for i in range(task * PACKED_ROWS, stop if stop < m else rounded_up(m, SIDE)):
        row = packed[i * ld : (i + 1) * ld]
        if i < m and is_narrow:
            of = shorts[2 * i * lda :]
            for j in range(k):
                row[j] = of[j]
            fill(row[k:], np.uint16(0))
        elif i < m:
            round_padded(row.ctypes.data, a[i * lda : i * lda + k], spare)
        else:
            fill(row, np.uint16(0))


@kernel
def pack_narrow_columns(packed, shorts, lda, m, k, group, spare):
    """A group of SIDE rows of an A in bfloat16 whose columns lie `lda` words apart; spare: room for
    COLUMN_WORDS."""
    ld, first = leading(k), group * SIDE
    words = spare[: LANES * SIDE]
    rows = spare[LANES * SIDE : COLUMN_WORDS].view(np.uint16)[: 2 * SIDE].reshape(2, SIDE)
    n = min(SIDE, m - first)
    for k0 in range(0, rounded_up(k, STEP), STEP):
        for i in range(LANES):
            column = k0 + 2 * i
            one = shorts.ctypes.data + column * lda * 4 + first * 2
            other = one + lda * 4
            fetch(one + STEP * lda * 4, SIDE * 2)
            fetch(other + STEP * lda * 4, SIDE * 2)
            if n < SIDE or column + 2 > k:
                for j in range(2):
                    here = column + j < k
                    for row in range(SIDE):
                        of = 2 * (column + j) * lda + first + row
                        rows[j, row] = shorts[of] if here and row < n else np.uint16(0)
                one, other = rows[0].ctypes.data, rows[1].ctypes.data
            pair_two(words[i * SIDE :].ctypes.data, one, other, SIDE)
        for i in range(0, SIDE, LANES):
            to = packed[(first + i) * ld + k0 :].ctypes.data
            transpose(to, ld // 2, words[i:].ctypes.data, SIDE)


@kernel
def pack_columns(packed, a, lda, m, k, group, spare):
    """The same of float32."""
    ld, first = leading(k), group * SIDE
    words, rows = spare[: LANES * SIDE], spare[LANES * SIDE : COLUMN_WORDS].reshape(2, SIDE)
    n = min(SIDE, m - first)
    for k0 in range(0, rounded_up(k, STEP), STEP):
        for i in range(LANES):
            at, column = a.ctypes.data, k0 + 2 * i
            one, other = at + (column * lda + first) * 4, at + ((column + 1) * lda + first) * 4
            fetch(one + STEP * lda * 4, SIDE * 4)
            fetch(other + STEP * lda * 4, SIDE * 4)
            if n < SIDE or column + 2 > k:
                for j in range(2):
                    here = column + j < k
                    for row in range(SIDE):
                        of = (column + j) * lda + first + row
                        rows[j, row] = a[of] if here and row < n else np.float32(0)
                one, other = rows[0].ctypes.data, rows[1].ctypes.data
            round_two(words[i * SIDE :].ctypes.data, one, other, SIDE)
        for i in range(0, SIDE, LANES):
            to = packed[(first + i) * ld + k0 :].ctypes.data
            transpose(to, ld // 2, words[i:].ctypes.data, SIDE)


@instruction(types.void(*(types.intp,) * 5))
def split_row(builder: Any, hi: Any, again: Any, lo: Any, of: Any, n: Any) -> None:
    """n floats, in whole vectors, as two rows of bfloat16, hi + lo; `hi` is also written to
    `again`."""
    floats, words = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
    with cgutils.for_range_slice(builder, I64(0), n, I64(LANES)) as (i, _):
        x, word = load(builder, at(builder, of, i), floats), builder.lshr(i, I64(1))
        rounded = narrow(builder, x)
        bits = builder.shl(builder.zext(rounded, words), every(words, 16))
        rest = narrow(builder, builder.fsub(x, builder.bitcast(bits, floats)))
        for value, to in ((rounded, hi), (rounded, again), (rest, lo)):
            store(builder, value, at(builder, to, word))


# -- panels ---------------------------------------------------------------------------------------


@kernel
def put_columns(panel, j, rows, n_steps):
    """Columns j … j + LANES of a panel, an address, n_steps of k = LANES rows of bfloat16."""
    to, ld = panel + j // LANES * TILE_BYTES, rows.strides[0] // 4
    for i in range(n_steps):
        transpose(to + i * 2 * TILE_BYTES, LANES, rows.ctypes.data + i * LINE, ld)


@kernel
def put_pairs(panels, i, one, other, n):
    """Rows i and i + 1 of panels (…, panel) = n numbers of two rows of bfloat16, whole panels."""
    to = panels.ctypes.data + i // STEP * 2 * TILE_BYTES + i % STEP // 2 * LINE
    _pair_rows(to, one.ctypes.data, other.ctypes.data, n, panels.strides[0])


@instruction(types.void(*(types.intp,) * 5))
def _pair_rows(builder: Any, to: Any, one: Any, other: Any, n: Any, panel: Any) -> None:
    """n columns of two rows as a row of pairs in panels, `panel` bytes apart; addresses."""
    index = ir.VectorType(I32, 2 * LANES)
    with cgutils.for_range(builder, builder.udiv(n, ir.Constant(I64, SIDE))) as loop:
        here = builder.mul(loop.index, ir.Constant(I64, SIDE // 2))
        rows = [load(builder, at(builder, x, here), _NUMBERS) for x in (one, other)]
        there = builder.add(to, builder.mul(loop.index, panel))
        for tile in (0, 1):
            columns = range(LANES * tile, LANES * (tile + 1))
            order = [x for column in columns for x in (column, 2 * LANES + column)]
            pairs = builder.shuffle_vector(*rows, ir.Constant(index, order))
            store(builder, pairs, at(builder, there, ir.Constant(I64, tile * TILE_BYTES // 4)))


@kernel
def unpack_panels(f, thread, transposed, pairs, w, n_rows, k, both):
    """B's panels of k numbers of n_rows rows of W: of Wᵀ, and of W if `both`; zeros up to the next
    whole panel. f: a frame with `rows`, `numbers` and `rounds`, as unpack_rows takes them."""
    rows = f.rows[thread]
    for first in range(0, rounded_up(n_rows, SIDE), LANES):
        panel = transposed[first // SIDE].ctypes.data
        for k0 in range(0, k, PIECE):
            here, n = columns_from(w, k0), min(PIECE, k - k0)
            unpack_rows(rows, here, first, n_rows, n, f.rounds, f.numbers[thread])
            to = panel + k0 // STEP * 2 * TILE_BYTES
            put_columns(to, first % SIDE, rows, (n + STEP - 1) // STEP)
            if both:
                panels, width = pairs[k0 // SIDE :], rounded_up(n, SIDE)
                for i in range(0, LANES, 2):
                    put_pairs(panels, first + i, rows[i], rows[i + 1], width)


def packed_size(m: int, k: int) -> int:
    """Numbers that `pack_rows` fills for A (m, k)."""
    return round_up(m, SIDE) * (round_up(k, STEP) + LINE // 2)


def panel_bytes(k: int) -> int:
    """Bytes from one panel of B to the next, for sums over up to k numbers."""
    return -(-k // STEP) * 2 * TILE_BYTES + LINE
