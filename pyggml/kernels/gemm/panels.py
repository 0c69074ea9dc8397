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
from pyggml.kernels.gemm.bfloat16 import make_pair, make_round, make_rounded_words
from pyggml.kernels.gemm.microkernel import fetch, make_spread, make_tile_product, make_transpose
from pyggml.kernels.gemm.tile import FLOAT_TILE, PAIR_TILE, Tile
from pyggml.sizes import round_up

LANES = CHOSEN.lanes
PAIR_NUMBERS = 2 * LANES  # numbers in a vector of pairs
PIECE = 256  # numbers of a row of A that are rounded at a time; whole vectors of pairs
_AHEAD = 16  # columns of A that are fetched before they are rounded
PACKED_GROUPS = 8  # groups of A's rows that are packed as pairs together: whole vectors of rows

float_product = make_tile_product(FLOAT_TILE)
pair_product = make_tile_product(PAIR_TILE)
transpose = make_transpose(LANES)
round_row, round_two = make_round(LANES, CHOSEN.bf16)
pair_two = make_pair(LANES)
_spread = make_spread(LANES, PAIR_TILE.mr)
transpose_rounded = make_transpose(LANES, make_rounded_words(CHOSEN.bf16))
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
def pack_pairs(packed, x, ld, kind, n_rows, depth, first, k0, rows, tile):
    """The groups of rows `first` … of x, PACKED_GROUPS of them, and PIECE numbers of each from k0
    on, as pairs, interleaved as (words, mr). kind: whether x lies in columns, not rows, which are
    ld words apart; and whether it is of bfloat16. `rows` is scratch of `packing_scratch` words."""
    mr, size, width = tile.mr, words_of(tile, depth), PACKED_GROUPS * tile.mr
    block, spare = rows[: PIECE // 2 * width], rows[PIECE // 2 * width :]
    begin, n_groups = k0 // 2, min(PACKED_GROUPS, (n_rows - first + mr - 1) // mr)
    n = min(size - begin, PIECE // 2)
    if kind[0] and kind[1]:
        _pair_columns(
            block, x.view(np.uint16), 2 * ld, n_rows, depth, first, begin, n, width, spare
        )
    elif kind[0]:
        _round_columns(block, x, ld, n_rows, depth, first, begin, n, width, spare)
    elif kind[1]:
        _take_rows(block, x, ld, n_rows, depth, first, begin, n, width, spare)
    else:
        _round_rows(block, x, ld, n_rows, depth, first, begin, n, width, spare)
    whole = max(0, n + 1 - (rounded_up(mr, LANES) + mr - 1) // mr)  # vectors stay within the piece
    for g in range(n_groups):
        to, of = packed[(first + g * mr) * size + begin * mr :], block[g * mr :]
        _spread(to.ctypes.data, of.ctypes.data, width, whole)
        for i in range(whole, n):
            for j in range(mr):
                to[i * mr + j] = of[i * width + j]


def packing_scratch(tile: Tile) -> int:
    """Words of scratch for pack_pairs."""
    width = PACKED_GROUPS * tile.mr
    return PIECE // 2 * width + LANES + max(2 * width, LANES * LANES + PAIR_NUMBERS)


@kernel
def _round_rows(block, x, ld, n_rows, depth, first, begin, n, width, spare):
    """block (n, width) = n words from `begin` on of `width` rows of x from row `first` on. Some
    rows at a time are read along: of many the CPU foresees none."""
    for i in range(0, width, LANES):
        for word in range(begin, begin + n, LANES):
            to = block.ctypes.data + ((word - begin) * width + i) * 4
            start, here = (first + i) * ld + 2 * word, min(PAIR_NUMBERS, depth - 2 * word)
            if here == PAIR_NUMBERS and first + i + LANES <= n_rows:
                transpose_rounded(to, width, x.ctypes.data + start * 4, ld)
                continue
            for j in range(LANES):
                row = spare[j * LANES : (j + 1) * LANES]
                if first + i + j < n_rows:
                    of = x[start + j * ld : start + j * ld + here]
                    round_numbers(row, of, spare[LANES * LANES :])
                else:
                    fill(row, np.float32(0))
            transpose(to, width, spare.ctypes.data, LANES)


@kernel
def _round_columns(block, x, ld, n_rows, depth, first, begin, n, width, spare):
    """The same of an x that lies in columns."""
    here, a, b = min(width, n_rows - first), spare[:width], spare[width : 2 * width]
    for i in range(n):
        k = 2 * (begin + i)
        at_a = x.ctypes.data + (k * ld + first) * 4
        at_b = at_a + ld * 4
        fetch(at_a + _AHEAD * ld * 4, width * 4)
        fetch(at_b + _AHEAD * ld * 4, width * 4)
        if here < width or k + 2 > depth:
            _take_padded(a, x[k * ld + first :], here if k < depth else 0)
            _take_padded(b, x[(k + 1) * ld + first :], here if k + 1 < depth else 0)
            at_a, at_b = a.ctypes.data, b.ctypes.data
        round_two(block[i * width :].ctypes.data, at_a, at_b, width)


@kernel
def transpose_words(to, ld_to, of, ld_of, n):
    """n words of LANES rows at `of`, in whole vectors, as so many rows at `to`; addresses."""
    for j in range(0, n, LANES):
        transpose(to + j * ld_to * 4, ld_to, of + j * 4, ld_of)


@kernel
def _take_rows(block, x, ld, n_rows, depth, first, begin, n, width, spare):
    """The words of `_round_rows`, where x is of bfloat16."""
    for i in range(0, width, LANES):
        for word in range(begin, begin + n, LANES):
            to = block.ctypes.data + ((word - begin) * width + i) * 4
            start, here = (first + i) * ld + word, min(LANES, depth // 2 - word)
            if here == LANES and first + i + LANES <= n_rows:
                transpose(to, width, x.ctypes.data + start * 4, ld)
                continue
            for j in range(LANES):
                row = spare[j * LANES : (j + 1) * LANES]
                _take_padded(row, x[start + j * ld :], here if first + i + j < n_rows else 0)
            transpose(to, width, spare.ctypes.data, LANES)


@kernel
def _pair_columns(block, x, ld, n_rows, depth, first, begin, n, width, spare):
    """The words of `_round_columns`, where x is of bfloat16; ld counts numbers."""
    here, two = min(width, n_rows - first), spare.view(np.uint16)
    a, b = two[:width], two[width : 2 * width]
    for i in range(n):
        k = 2 * (begin + i)
        at_a = x.ctypes.data + (k * ld + first) * 2
        at_b = at_a + ld * 2
        fetch(at_a + _AHEAD * ld * 2, width * 2)
        fetch(at_b + _AHEAD * ld * 2, width * 2)
        if here < width or k + 2 > depth:
            _take_padded(a, x[k * ld + first :], here if k < depth else 0)
            _take_padded(b, x[(k + 1) * ld + first :], here if k + 1 < depth else 0)
            at_a, at_b = a.ctypes.data, b.ctypes.data
        pair_two(block[i * width :].ctypes.data, at_a, at_b, width)


@kernel
def _take_padded(to, x, n):
    """to = the first n numbers of x, then zeros."""
    for i in range(n):
        to[i] = x[i]
    for i in range(n, to.size):
        to[i] = 0


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
            for i in range(mr, 2 * mr):  # the next tile's, which the CPU does not foresee
                fetch(c_at + (start + i * window.ldc) * 4, 4 * width)
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
