"""What every product does with its two sides: packed groups, panels, and the loop over the tiles.

One side is packed in groups of MR rows, interleaved as (depth, MR), the other comes in panels
(depth, PANEL). A slot is 32 bits of depth: one float32, or with `pairs` two neighbouring bfloat16
whose products the CPU adds in float32. A matrix of pairs is thus stored and moved like a float32
matrix of half the depth, and only rounding and the microkernel differ.
"""

from __future__ import annotations

import numpy as np

from pyggml._isa import CHOSEN
from pyggml._jit import kernel
from pyggml._simd import fill
from pyggml.gemm.microkernel import make_dot_tile, make_round, make_tile_product, make_transpose

LANES, MR, PANEL = CHOSEN.lanes, CHOSEN.mr, CHOSEN.panel
PADDED_MR = CHOSEN.padded_mr
TILE = 128  # rows of W in panels at one time; a multiple of every panel
DEPTH = 256  # reduction length of one pass, in numbers; a multiple of every block length
HALF = DEPTH // 2  # slots of it as pairs
PAIRED = 2 * LANES  # numbers that fill a vector of pairs
SPILL = -(-(PADDED_MR - MR) // MR)  # rows that `interleave` overwrites after its last

tile_product = make_tile_product(MR, CHOSEN.nv, LANES, pairs=False)
pair_product = make_tile_product(MR, CHOSEN.nv, LANES, pairs=True, bf16=CHOSEN.bf16)
# For a side of few rows: MR = 4 fits every register file both ways.
THIN_MR, THIN_PANEL = 4, 2 * LANES
thin_product = make_tile_product(THIN_MR, 2, LANES, pairs=False)
dot_tile = make_dot_tile(THIN_MR, LANES)
transpose = make_transpose(LANES)
round_row, round_two = make_round(LANES, CHOSEN.bf16)


def slots(depth: int, pairs: bool) -> int:
    """Slots of `depth` numbers; pairs are padded with zeros to whole vectors."""
    return -(-depth // PAIRED) * LANES if pairs else depth


def packed_slots(n_rows: int, depth: int, pairs: bool) -> int:
    """Slots of the packed form of an (n_rows, depth) matrix."""
    return -(-n_rows // MR) * MR * slots(depth, pairs)


@kernel
def slots_of(k, pairs):
    """`slots` for kernels."""
    return (k + PAIRED - 1) // PAIRED * LANES if pairs else k


@kernel
def pack_group(packed, x, start, row_step, column_step, n_rows, depth, group):
    """Rows group·MR … of x, interleaved as (depth, MR); rows past the end are zeros."""
    first = group * MR
    mine = packed[group * MR * depth : (group + 1) * MR * depth]
    done = 0
    if row_step == 1:  # a transposed matrix: its columns are contiguous
        n = min(MR, n_rows - first)
        for k in range(depth):
            to, of = mine[k * MR :][:MR], x[start + first + k * column_step :]
            for i in range(n):
                to[i] = of[i]
            for i in range(n, MR):
                to[i] = 0
        return
    if column_step == 1 and first + PADDED_MR <= n_rows:
        done = max(0, depth - SPILL) // LANES * LANES
        interleave(mine.ctypes.data, x.ctypes.data + (start + first * row_step) * 4, row_step, done)
    for i in range(MR):
        inside = first + i < n_rows
        for k in range(done, depth):
            source = start + (first + i) * row_step + k * column_step
            mine[k * MR + i] = x[source] if inside else 0


@kernel
def interleave(to, of, row_step, depth):
    """(depth, MR) from PADDED_MR rows of slots; addresses, depth in whole vectors.

    A store of a whole vector runs over into the next row, which the next store puts right; after
    the last row up to LANES slots are overwritten.
    """
    for k in range(0, depth, LANES):
        for i in range(PADDED_MR - LANES, -1, -LANES):
            transpose(to + (k * MR + i) * 4, MR, of + (i * row_step + k) * 4, row_step)


@kernel
def pack_pairs_group(packed, x, row_step, n_rows, depth, group, rows):
    """Rows group·MR … of x as pairs, interleaved as (slots, MR); `rows` is scratch."""
    first, size = group * MR, slots_of(depth, True)
    mine = packed[group * MR * size : (group + 1) * MR * size]
    for k0 in range(0, depth, DEPTH):
        k = min(DEPTH, depth - k0)
        n = slots_of(k, True)
        for i in range(PADDED_MR):
            row = rows[i * HALF : i * HALF + n]
            if i < MR and first + i < n_rows:
                start = (first + i) * row_step + k0
                round_numbers(row, x[start : start + k], rows[PADDED_MR * HALF :])
            else:
                fill(row, np.float32(0))
        to = mine[k0 // 2 * MR :]
        interleave(to.ctypes.data, rows.ctypes.data, HALF, n - LANES)
        for s in range(n - LANES, n):  # where a whole store would run over
            for i in range(MR):
                to[s * MR + i] = rows[i * HALF + s]


@kernel
def round_numbers(row, x, spare):
    """row = x as pairs, with zeros up to the next whole vector; `spare` holds one such vector."""
    k = x.shape[0]
    whole = k // PAIRED * PAIRED
    round_row(row.ctypes.data, x.ctypes.data, whole)
    if whole < k:
        for i in range(PAIRED):
            spare[i] = x[whole + i] if whole + i < k else np.float32(0)
        round_row(row[whole // 2 :].ctypes.data, spare.ctypes.data, PAIRED)


@kernel
def multiply_panel(
    packed, depth, k0, k, pairs, groups, b, edge, c, c_start, ldc, n_rows, n_columns, accumulate
):
    """c[:, :n_columns] (+)= packed[:, k0:k0+k] · b for groups (first, past the last) of MR rows.

    b is the address of a panel (k, PANEL); depth, k0 and k count slots.
    """
    c_at, edge_at, packed_at = c.ctypes.data, edge.ctypes.data, packed.ctypes.data
    for g in range(groups[0], groups[1]):
        a = packed_at + (g * depth + k0) * MR * 4
        here = c_start + g * MR * ldc
        rows = min(MR, n_rows - g * MR)
        whole = rows == MR and n_columns == PANEL
        to, step = (c_at + here * 4, ldc) if whole else (edge_at, PANEL)
        if pairs:
            pair_product(a, b, PANEL, to, step, k, accumulate and whole)
        else:
            tile_product(a, b, PANEL, to, step, k, accumulate and whole)
        if whole:
            continue
        add_edge(c, here, ldc, edge, rows, n_columns, accumulate)


@kernel
def add_edge(c, start, ldc, edge, n_rows, n_columns, accumulate):
    """The part of a whole tile, `edge`, that lies inside C."""
    for i in range(n_rows):
        row = start + i * ldc
        to, of = c[row : row + n_columns], edge[i * PANEL : i * PANEL + n_columns]
        if accumulate:
            for j in range(n_columns):
                to[j] += of[j]
        else:
            for j in range(n_columns):
                to[j] = of[j]


@kernel
def split(n_groups, n_parts, part):
    """The groups of one of n_parts equal shares."""
    return n_groups * part // n_parts, n_groups * (part + 1) // n_parts
