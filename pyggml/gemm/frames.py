"""What the products with a packed weight have in common: sizes of their tasks, frame and scratch.

A frame holds y, x, floats from row to row of x, the weight (`weight_of`), T tokens, N, K, whether
to add to y, packed x, every thread's scratch, shares of the tokens, and what a product has of its
own.
"""

from __future__ import annotations

from pyggml._jit import kernel
from pyggml._tasks import floats2, integer
from pyggml.gemm.blocks import WIDE
from pyggml.gemm.int8_tile import ROW
from pyggml.gemm.int8_tile import ROWS as ROWS_OF_BYTES
from pyggml.gemm.microkernel import call_block, fetch
from pyggml.gemm.panels import DEPTH, HALF, LANES, MR, PADDED_MR, PAIRED, PANEL, TILE, split

COLUMNS = 256  # weight columns of one backward task; a multiple of every block length
CHUNK = 128  # weight rows that one backward pass reduces over; a multiple of PAIRED

# Floats of scratch that one thread needs: unpacked rows, the tile in panels, and one edge of C.
ROWS = max(LANES * DEPTH, WIDE * COLUMNS, PADDED_MR * HALF + PAIRED, ROWS_OF_BYTES)
TILE_FLOATS = max(DEPTH * TILE, CHUNK * COLUMNS, max(TILE, COLUMNS) * ROW)
SCRATCH = ROWS + TILE_FLOATS + MR * PANEL

Weight = tuple[int, int, int, int, int]  # as `weight_of` reads it


@kernel
def weight_of(frame):
    """Address, bytes of a row, address of the unpacker, elements and bytes of a block."""
    ints = (integer(frame, 3), integer(frame, 4), integer(frame, 5))
    return (*ints, integer(frame, 6), integer(frame, 7))


@kernel
def scratch_of(frame, thread):
    """This thread's unpacked rows, tile and edge."""
    mine = floats2(frame, 13)[thread]
    return mine[:ROWS], mine[ROWS : ROWS + TILE_FLOATS], mine[ROWS + TILE_FLOATS :]


@kernel
def share_of(frame, task):
    """Which tile a task multiplies, and with which groups of rows of x: first, past the last."""
    n_groups, n_parts = (integer(frame, 8) + MR - 1) // MR, integer(frame, 14)
    return task // n_parts, split(n_groups, n_parts, task % n_parts)


@kernel
def rows_from(weight, first):
    """The weight's rows from `first` on."""
    address, row_bytes, code, block, block_bytes = weight
    return address + first * row_bytes, row_bytes, code, block, block_bytes


@kernel
def columns_from(weight, first):
    """The weight's columns from `first` on, where a block begins."""
    address, row_bytes, code, block, block_bytes = weight
    return address + first // block * block_bytes, row_bytes, code, block, block_bytes


@kernel
def unpack_row(to, weight, row, n, ahead):
    """The weight's first n numbers of a row, whole blocks, to this address. The same of the row
    `ahead` is fetched: a task reads short pieces of rows, which the CPU does not foresee."""
    address, row_bytes, code, block, block_bytes = weight
    here, n_blocks = address + row * row_bytes, n // block
    fetch(here + ahead * row_bytes, n_blocks * block_bytes)
    call_block(code, to, here, n_blocks)


def parts(n_rows: int, n_tiles: int, n_threads: int) -> int:
    """Shares of the rows that give every thread something to do; each unpacks its tile anew."""
    return min(-(-n_rows // MR), max(1, 2 * n_threads // n_tiles))
