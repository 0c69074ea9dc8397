"""What the products with a weight have in common: their frames, sizes of their tasks, scratch."""

from __future__ import annotations

from typing import NamedTuple

from pyggml._frames import Bool, Floats1, Floats2, Frame, Int
from pyggml._jit import kernel
from pyggml.gemm.int8_tile import ROW
from pyggml.gemm.int8_tile import ROWS as ROWS_OF_BYTES
from pyggml.gemm.microkernel import call_block, fetch
from pyggml.gemm.panels import DEPTH, HALF, LANES, MR, PADDED_MR, PAIRED, PANEL, TILE, split
from pyggml.quants.layout import GROUP

COLUMNS = 256  # weight columns of one backward task; a multiple of every block length
CHUNK = 128  # weight rows that one backward pass reduces over; a multiple of PAIRED

# Floats of scratch that one thread needs: unpacked rows, the tile in panels, and one edge of C.
ROWS = max(LANES * DEPTH, GROUP * COLUMNS, PADDED_MR * HALF + PAIRED, ROWS_OF_BYTES)
TILE_FLOATS = max(DEPTH * TILE, CHUNK * COLUMNS, max(TILE, COLUMNS) * ROW)
SCRATCH = ROWS + TILE_FLOATS + MR * PANEL


class BlockMatrix(NamedTuple):
    """A weight as tasks read it: rows of blocks."""

    address: int
    row_bytes: int
    unpack: int  # address of the type's unpacker
    block: int  # numbers of a block
    block_bytes: int


class Product(Frame):
    """C (m, n) (+)= A (m, k) · B (k, n); B is made of W's rows: B = Wᵀ forward, B = W backward."""

    c: Floats1
    a: Floats1
    lda: Int  # floats from row to row of A
    w: BlockMatrix
    m: Int
    n: Int
    k: Int
    accumulate: Bool
    scratch: Floats2  # a row for each thread


class TiledProduct(Product):
    """Whose tasks multiply one tile of B with a share of A's groups of MR rows."""

    packed_a: Floats1
    n_shares: Int


@kernel
def scratch_of(f, thread):
    """This thread's unpacked rows, tile and edge."""
    mine = f.scratch[thread]
    return mine[:ROWS], mine[ROWS : ROWS + TILE_FLOATS], mine[ROWS + TILE_FLOATS :]


@kernel
def share_of(f, task):
    """Which tile a task multiplies, and with which groups of rows of A: first, past the last."""
    n_groups = (f.m + MR - 1) // MR
    return task // f.n_shares, split(n_groups, f.n_shares, task % f.n_shares)


@kernel
def rows_from(w, first):
    """W's rows from `first` on."""
    here = w.address + first * w.row_bytes
    return BlockMatrix(here, w.row_bytes, w.unpack, w.block, w.block_bytes)


@kernel
def columns_from(w, first):
    """W's columns from `first` on, where a block begins."""
    here = w.address + first // w.block * w.block_bytes
    return BlockMatrix(here, w.row_bytes, w.unpack, w.block, w.block_bytes)


@kernel
def unpack_row(to, w, row, n, ahead):
    """W's first n numbers of a row, whole blocks, to this address. The same of the row `ahead` is
    fetched: a task reads short pieces of rows, which the CPU does not foresee."""
    here, n_blocks = w.address + row * w.row_bytes, n // w.block
    fetch(here + ahead * w.row_bytes, n_blocks * w.block_bytes)
    call_block(w.unpack, to, here, n_blocks)


def shares(n_rows: int, n_tiles: int, n_threads: int) -> int:
    """Shares of the rows that give every thread something to do; each unpacks its tile anew."""
    return min(-(-n_rows // MR), max(1, 2 * n_threads // n_tiles))
