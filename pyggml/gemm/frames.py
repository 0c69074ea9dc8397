"""What the products with a weight have in common: their frames, the sizes of their tasks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pyggml._frames import Bool, Floats1, Floats2, Frame, Int
from pyggml._jit import Code, kernel
from pyggml._tasks import launch, stage
from pyggml.call import Call
from pyggml.dtypes import DType
from pyggml.gemm.microkernel import call_block, fetch
from pyggml.gemm.panels import MR, TILE, split
from pyggml.gemm.path import Operands, Problem, flat

COLUMNS = 256  # weight columns of one backward task; a multiple of every block length


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


def block_matrix(w: np.ndarray, kind: DType, unpack: int) -> BlockMatrix:
    """A weight as tasks read it; unpack: the address of its unpacker."""
    return BlockMatrix(w.ctypes.data, w.strides[0], unpack, kind.block, kind.block_bytes)


class Tasks(NamedTuple):
    """Of a tiled product: they pack a group of A's rows, and multiply a tile of Wᵀ or of W."""

    pack: Code
    forward: Code
    backward: Code


def tiled_call(
    tasks: Tasks, declaration: type[TiledProduct], p: Problem, o: Operands, w: BlockMatrix,
    packed: np.ndarray, scratch: np.ndarray, **own: Any,
) -> Call:  # fmt: skip
    """The stages of a tiled product; own: the fields that its frame has beside a TiledProduct's."""
    forward = p.form == "mul_mat"
    n_tiles = -(-p.n // (TILE if forward else COLUMNS))
    n_shares = shares(p.m, n_tiles, len(scratch))
    f = declaration(
        c=o.c.reshape(-1), a=flat(o.a), lda=o.lda, w=w, m=p.m, n=p.n, k=p.k,
        accumulate=o.accumulate, scratch=scratch, packed_a=packed, n_shares=n_shares, **own,
    )  # fmt: skip
    multiply = stage(tasks.forward if forward else tasks.backward, f, n_tiles * n_shares)
    if o.packing is not None and o.packing.done:
        return Call(launch, multiply)
    return Call(launch, stage(tasks.pack, f, -(-p.m // MR)), multiply)
