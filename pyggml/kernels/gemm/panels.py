"""Packing the operands of a product, and multiplying them by a microkernel.

A is packed in groups of mr rows, interleaved as (words, mr), B in panels (words, panel); see
pyggml.kernels.gemm.tile. A matrix of pairs is stored and moved like a float32 matrix of half the
depth. Only rounding and the microkernel differ.
"""

from typing import NamedTuple

import numpy as np

from pyggml.jit import kernel
from pyggml.jit.isa import CHOSEN
from pyggml.jit.simd import fill
from pyggml.kernels.gemm.bfloat16 import make_round
from pyggml.kernels.gemm.microkernel import make_tile_product, make_transpose
from pyggml.kernels.gemm.tile import FLOAT_TILE, PAIR_TILE
from pyggml.sizes import round_up

LANES = CHOSEN.lanes
PAIR_NUMBERS = 2 * LANES  # numbers in a vector of pairs
PIECE = 256  # numbers of a row of A that are rounded at a time; whole vectors of pairs
PIECE_WORDS = PIECE // 2

float_product = make_tile_product(FLOAT_TILE)
pair_product = make_tile_product(PAIR_TILE)
transpose = make_transpose(LANES)
round_row, round_two = make_round(LANES, CHOSEN.bf16)
rounded_up = kernel(round_up)

# -- packing A ------------------------------------------------------------------------------------


class View(NamedTuple):
    """Where a matrix lies in a flat array: its first number, and the steps from row to row and from
    column to column."""

    start: int
    row_step: int
    column_step: int


@kernel
def words_of(tile, depth):
    """Words of `depth` numbers, as Tile.words has them."""
    return depth if tile.per_word == 1 else rounded_up(depth, PAIR_NUMBERS) // 2


@kernel
def pack_group(packed, x, view, n_rows, depth, group, tile):
    """Pack rows group · mr … of x, interleaved as (depth, mr); rows past the end are zeros."""
    mr, first, done = tile.mr, group * tile.mr, 0
    mine = packed[first * depth : (first + mr) * depth]
    start = view.start + first * view.row_step
    if view.row_step == 1:  # a transposed matrix: its columns are contiguous
        n = min(mr, n_rows - first)
        for k in range(depth):
            to, of = mine[k * mr :][:mr], x[start + k * view.column_step :]
            for i in range(n):
                to[i] = of[i]
            for i in range(n, mr):
                to[i] = 0
        return
    if view.column_step == 1 and first + rounded_up(mr, LANES) <= n_rows:
        done = _whole_stores(depth, mr)
        _interleave(mine.ctypes.data, x.ctypes.data + start * 4, view.row_step, done, mr)
    for i in range(mr):
        inside = first + i < n_rows
        for k in range(done, depth):
            source = start + i * view.row_step + k * view.column_step
            mine[k * mr + i] = x[source] if inside else 0


@kernel
def pack_pairs_group(packed, x, row_step, n_rows, depth, group, rows, tile):
    """Rows group · mr … of x as pairs, interleaved as (words, mr); `rows` is scratch for whole
    vectors of rows, PIECE_WORDS apart, and one vector of pairs."""
    mr, first, size = tile.mr, group * tile.mr, words_of(tile, depth)
    mine, n_scratch = packed[first * size : (first + mr) * size], rounded_up(mr, LANES)
    for k0 in range(0, depth, PIECE):
        k = min(PIECE, depth - k0)
        n = words_of(tile, k)
        for i in range(n_scratch):
            row = rows[i * PIECE_WORDS : i * PIECE_WORDS + n]
            if i < mr and first + i < n_rows:
                start = (first + i) * row_step + k0
                round_numbers(row, x[start : start + k], rows[n_scratch * PIECE_WORDS :])
            else:
                fill(row, np.float32(0))
        interleave_rows(mine[k0 // 2 * mr :], rows, PIECE_WORDS, n, mr)


@kernel
def round_numbers(row, x, spare):
    """row = x as pairs, with zeros up to a whole vector; `spare` has room for one vector."""
    k = x.shape[0]
    whole = k // PAIR_NUMBERS * PAIR_NUMBERS
    round_row(row.ctypes.data, x.ctypes.data, whole)
    if whole < k:
        for i in range(PAIR_NUMBERS):
            spare[i] = x[whole + i] if whole + i < k else np.float32(0)
        round_row(row[whole // 2 :].ctypes.data, spare.ctypes.data, PAIR_NUMBERS)


# -- interleaving ---------------------------------------------------------------------------------


@kernel
def interleave_rows(to, rows, ld, depth, mr):
    """to (depth, mr) from the first of whole vectors of rows of words, ld apart."""
    done = _whole_stores(depth, mr)
    _interleave(to.ctypes.data, rows.ctypes.data, ld, done, mr)
    for k in range(done, depth):
        for i in range(mr):
            to[k * mr + i] = rows[i * ld + k]


@kernel
def _interleave(to, of, ld, depth, mr):
    """(depth, mr) from whole vectors of rows of words; addresses, depth in whole vectors.

    A store of a whole vector also writes to the next row, which the next store corrects. After the
    last row, up to LANES words are overwritten.
    """
    for k in range(0, depth, LANES):
        for i in range(rounded_up(mr, LANES) - LANES, -1, -LANES):
            transpose(to + (k * mr + i) * 4, mr, of + (i * ld + k) * 4, ld)


@kernel
def _whole_stores(depth, mr):
    """The part of a depth, in whole vectors, for which `_interleave` stays within (depth, mr)."""
    overwritten = rounded_up(rounded_up(mr, LANES), mr) // mr - 1  # rows after the last
    return max(0, depth - overwritten) // LANES * LANES


# -- multiplying ----------------------------------------------------------------------------------


class PackedPart(NamedTuple):
    """A part of packed A: some groups, and some of their words."""

    depth: int  # words of a whole row
    first: int
    n: int
    group: int
    last: int  # the group past the last


class Window(NamedTuple):
    """The columns of C that panels contribute to; C is a matrix in a flat array."""

    start: int
    ldc: int
    n_rows: int
    n_columns: int


@kernel
def multiply_panels(tile, packed, part, panels, edge, c, window, accumulate):
    """c's window (+)= part of A · panels (n, panel); `edge` is scratch for a tile of C."""
    mr, width = tile.mr, tile.panel
    packed_at, c_at, edge_at = packed.ctypes.data, c.ctypes.data, edge.ctypes.data
    for column in range(0, window.n_columns, width):
        b = panels.ctypes.data + column * part.n * 4
        n_columns = min(width, window.n_columns - column)
        for g in range(part.group, part.last):
            a = packed_at + (g * part.depth + part.first) * mr * 4
            start = window.start + column + g * mr * window.ldc
            n_rows = min(mr, window.n_rows - g * mr)
            inside = n_rows == mr and n_columns == width
            to, ldc = (c_at + start * 4, window.ldc) if inside else (edge_at, width)
            if tile.per_word == 2:
                pair_product(a, b, width, to, ldc, part.n, accumulate and inside)
            else:
                float_product(a, b, width, to, ldc, part.n, accumulate and inside)
            if not inside:
                add_edge(c, start, window.ldc, edge, width, n_rows, n_columns, accumulate)


@kernel
def add_edge(c, start, ldc, edge, width, n_rows, n_columns, accumulate):
    """Write or add the part of `edge` (mr, width), a tile of C, that lies inside C."""
    for i in range(n_rows):
        row = start + i * ldc
        to, of = c[row : row + n_columns], edge[i * width : i * width + n_columns]
        if accumulate:
            for j in range(n_columns):
                to[j] += of[j]
        else:
            for j in range(n_columns):
                to[j] = of[j]


@kernel
def split(n_groups, n_parts, part):
    """The groups of one of n_parts equal shares: the first, and the one past the last."""
    return n_groups * part // n_parts, n_groups * (part + 1) // n_parts
