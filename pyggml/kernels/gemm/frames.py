"""The frames of products with a weight, and how the products are cut into tasks.

A task multiplies some columns of B with a share of A's groups of rows.
"""

from collections.abc import Callable
from math import ceil, lcm
from typing import Any, ClassVar, NamedTuple

import numpy as np

from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, DType
from pyggml.jit import Code, kernel
from pyggml.jit.frames import Bool, Floats1, Floats2, Frame, Int, Switch
from pyggml.jit.scratch import Scratch
from pyggml.jit.simd import fill
from pyggml.jit.tasks import frame_code, launch, of_threads, stage, task_code, whole
from pyggml.kernels.gemm.beside import Beside, begin, besides, fields_of, finish, take_columns
from pyggml.kernels.gemm.microkernel import call_block, call_unpack, fetch
from pyggml.kernels.gemm.panels import add_edge, split
from pyggml.kernels.gemm.path import Operands, Problem, flat
from pyggml.kernels.gemm.tile import Tile, TileShape
from pyggml.sizes import round_up

# The most columns of B in one task: rows of W forward, numbers of W's rows backward. They are
# multiples of every panel, the latter also of every block of weights.
FORWARD_COLUMNS, BACKWARD_COLUMNS = 128, 256


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
    lda: Int  # words from row to row of A, or from column to column
    w: BlockMatrix
    m: Int
    n: Int
    k: Int
    accumulate: Switch


class TiledProduct(Product, Beside):
    """A product of packed operands: all of A, and of B the panels of one task's columns.

    A kind is a subclass with the kernel

    meet(f, thread, group, column, k0, k, c, ldc, adds)  a tile, at c, (+)= a group of A · a panel

    and code, forward and backward, for

    unpack(f, thread, first, n, k0, k)                   panels: k numbers of n columns of B
    """

    tile: TileShape
    unpack: Int  # the address of its code: what multiplies is compiled once for both directions
    depth: Int  # numbers of k in a pass over B, whose panels stay in the second cache
    columns: Int  # of B in a task
    a_in_columns: Bool
    a_is_narrow: Bool
    w_bytes: Int  # of a number of W, if it is of bfloat16, as pairs are, or rounded to it; else 0
    packed_a: Floats1
    n_shares: Int  # of A's groups of rows
    # of each thread
    rows: Floats2  # what is unpacked, before it is transposed or interleaved
    panels: Floats2
    edge: Floats2  # one tile of C
    meet: ClassVar[Any]

    @kernel
    def multiply(f, thread, columns, groups, k0, k, adds):
        """C[:, columns] (+)= A[:, k0 : k0 + k] · the thread's panels, for some groups of rows."""
        c, edge, mr, panel = f.c, f.edge[thread], f.tile.mr, f.tile.panel
        for g in range(groups[0], groups[1]):
            n_rows = min(mr, f.m - g * mr)
            for column in range(columns[0], columns[1], panel):
                start, n = g * mr * f.n + column, min(panel, columns[1] - column)
                inside = n_rows == mr and n == panel
                to, ldc = (c.ctypes.data + start * 4, f.n) if inside else (edge.ctypes.data, panel)
                f.meet(thread, g, column - columns[0], k0, k, to, ldc, inside and adds)
                if not inside:
                    add_edge(c, start, f.n, edge, panel, n_rows, n, adds)
            if k0 + k == f.k:  # while these rows of C are in the first cache
                finish(f, thread, rows_of_groups(f, (g, g + 1)), columns)


def panels_code(declaration: type[TiledProduct]) -> Callable[[Callable], Code]:
    """Declare the code that unpacks B for frames of this class."""
    return task_code(declaration, n_integers=5)


def _multiply_task(f, task, thread):
    """Some columns of C, for a share of A's groups of rows, pass by pass."""
    first, n, groups = share_of(f, task)
    columns = first, first + n
    for k0 in range(0, f.k, f.depth):
        k = min(f.depth, f.k - k0)
        call_unpack(f, f.unpack, thread, first, n, k0, k)
        if k0 == 0:
            take_columns(f, thread, columns)
            begin(f, thread, rows_of_groups(f, groups), columns)
        f.multiply(thread, columns, groups, k0, k, f.accumulate or f.begins or k0 > 0)


@kernel
def share_of(f, task):
    """A task's share: (the first of its columns of B, how many, the first of its groups of A, the
    group past the last)."""
    first, n_groups = task // f.n_shares * f.columns, (f.m + f.tile.mr - 1) // f.tile.mr
    groups = split(n_groups, f.n_shares, task % f.n_shares)
    return first, min(f.columns, f.n - first), groups


@kernel
def rows_of_groups(f, groups):
    """The rows of C of some groups: the first, and the one past the last."""
    return groups[0] * f.tile.mr, min(groups[1] * f.tile.mr, f.m)


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
    """Unpack the first n numbers of a row of W, whole blocks, to this address. The row `ahead` is
    prefetched: a task reads short pieces of rows, which the CPU does not foresee."""
    here, n_blocks = w.address + row * w.row_bytes, n // w.block
    fetch(here + ahead * w.row_bytes, n_blocks * w.block_bytes)
    call_block(w.unpack, to, here, n_blocks)


@kernel
def unpack_rows(rows, ld, w, first, n_rows, n, count):
    """n numbers of `count` rows of W from `first` on, ld words apart; zeros from row n_rows on."""
    for i in range(count):
        row = rows[i * ld : (i + 1) * ld]
        if first + i < n_rows:
            unpack_row(row.ctypes.data, w, first + i, n, count)
        else:
            fill(row, np.float32(0))


def shares(p: Problem, mr: int, n_tasks: float, n_threads: int, unpacking: int = 8) -> int:
    """In how many shares of A's groups of mr rows, with n_tasks tasks each, threads end soonest.
    The last task has fewer columns where n_tasks is no whole number.

    A task unpacks its columns anew, which takes as long as `unpacking` rows of A, and then the rows
    of its share. At the end of a region a thread waits for a quarter of a task.
    """

    def rows_of_a_thread(n_shares: int) -> float:
        rows = -(-n_groups // n_shares) * mr + unpacking
        n_whole, every = int(n_tasks) * n_shares, n_tasks * n_shares
        most = max(-(-n_whole // n_threads), every / n_threads, min(n_tasks, 1))
        return (most + 0.25) * rows

    n_groups = -(-p.m // mr)
    return min(range(1, min(n_groups, 4 * n_threads) + 1), key=rows_of_a_thread)


def block_matrix(w: np.ndarray, kind: DType, unpack: int) -> BlockMatrix:
    """A weight as tasks read it; unpack: the address of its unpacker."""
    return BlockMatrix(w.ctypes.data, w.strides[0], unpack, kind.block, kind.block_bytes)


def task_columns(p: Problem, panel: int) -> int:
    """Columns of B in a task: as few tasks as there can be have equally many whole panels, and
    blocks of W's rows where these are cut."""
    most, step = (FORWARD_COLUMNS, panel) if p.form == "mul_mat" else (
        BACKWARD_COLUMNS, lcm(panel, p.weight_type.block)
    )  # fmt: skip
    return min(round_up(-(-p.n // -(-p.n // most)), step), most)


def tiled_call(
    declaration: type[TiledProduct], pack: Code, unpack: Code, p: Problem, o: Operands,
    w: BlockMatrix, tile: Tile, scratch: Scratch, n_packs: int = 0, unpacking: int = 8,
    **further: Any,
) -> Call:  # fmt: skip
    """The stages of a tiled product; pack: packs a group of A's rows, or is one of n_packs tasks;
    unpack: makes panels of B; unpacking: as `shares` has it; further: the fields of its frame that
    have no common value."""
    n_groups = -(-p.m // tile.mr)
    columns = task_columns(p, tile.panel)
    n_tasks = p.n / columns
    n_shares = shares(p, tile.mr, n_tasks, len(scratch["panels"]), unpacking)
    f = declaration(
        c=o.c.reshape(-1), a=flat(o.a), lda=o.a.strides[1] // 4 if p.a_in_columns else o.lda,
        w=w, m=p.m, n=p.n, k=p.k, accumulate=o.accumulate, tile=tile.shape,
        unpack=unpack.address, columns=columns,
        a_in_columns=p.a_in_columns, a_is_narrow=p.a_is_narrow,
        w_bytes=2 * (p.weight_type is BF16) + 4 * p.rounds_w, n_shares=n_shares,
        **fields_of(p, o, scratch), **further,
    )  # fmt: skip
    packed = scratch["packed_a"]
    own = of_threads({name: x for name, x in scratch.items() if name != "packed_a"})
    code, c = frame_code(_multiply_task, declaration), whole(f.values["c"], False)
    n = ceil(n_tasks) * n_shares
    multiply = stage(code, f, n, c, whole(o.b), whole(packed), *besides(f), *own)
    if o.packing is not None and o.packing.done:
        return Call(launch, multiply)
    a, n_packs = whole(f.values["a"]), n_packs or n_groups
    return Call(launch, stage(pack, f, n_packs, a, whole(packed, False), *own), multiply)
