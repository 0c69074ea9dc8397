"""Tiles of 16-bit floats in shared memory, and how the lanes of a warp read them for products.

A tile has rows of D numbers, D 64, 128 or 256. The 16-byte chunks of a row are exchanged by the
row's number, so that eight rows of one column of chunks lie in different banks. Lane l = 4g + t of
a warp holds, of a 16×8 result, the numbers (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
"""

from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.code import group_ptx, ptx
from pyggml.backends.cuda.code.group_ptx import ROW
from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.graph.dtypes import BF16, F16

THREADS = 128  # of a block: four warps
BR = 64  # queries of a block: B_r of Dao et al.
HEAD_SIZES = (64, 128)  # of gradients, and of the forward pass beside them
ALIGNED = 1024  # bytes: a tile begins at a multiple of this


@device
def longest_first(number, n):
    """The group of rows that block `number` of n takes, where later groups have more to do, as
    under a causal mask: the longer half from the last on, then the others from the first on.

    So two blocks that share a multiprocessor, one of each half, have as much to do as any two.
    """
    half = n - n // 2
    return n - 1 - number if number < half else number - half


@cache
def tile_copier(rows: int, head_size: int, in_groups: bool = False) -> Any:
    """copy(tile, at, x, first, head, n, n_heads): starts the copies of rows first … of x
    (n, n_heads, D) to byte `at` of a tile, zeros from n on.

    in_groups: as group_ptx.py wants rows, 64 numbers of each behind each other
    """
    chunks, row_bytes = head_size // 8, 2 * head_size
    shift, together = chunks.bit_length() - 1, THREADS // chunks  # rows at once
    of_tile = ROW if in_groups else row_bytes

    @device
    def copy(tile, at, x, first, head, n, n_heads):
        row, chunk = cuda.threadIdx.x >> shift, cuda.threadIdx.x & (chunks - 1)
        source = (np.int64(first + row) * n_heads + head) * row_bytes + chunk * 16
        if in_groups:
            at, chunk = at + (chunk >> 3) * (rows * ROW), chunk & 7
        for i in range(rows // together):
            inside = first + row + i * together < n
            of_row = source + i * together * n_heads * row_bytes
            place = (chunk ^ ((row + i * together) & 7)) << 4
            to_row = at + (row + i * together) * of_tile + place
            ptx.copy_16(tile, to_row, x, of_row if inside else 0, np.int32(16 if inside else 0))

    return copy


@cache
def readers(head_size: int) -> tuple[Any, Any, Any]:
    """(left, right, across): fragments of a tile at byte `at`.

    left(tile, at, row, k)       A: rows row … + 15, numbers 16k … + 15 of each
    right(tile, at, row, k)      B of two results: n is the row, row … + 15; k as above
    across(tile, at, row, n)     B of two results: k is the row, row … + 15; n from 16n on

    8 divides `row`. Chunk 2k + c of row r lies at ((2k + c) ^ (r & 7)) << 4 of its row, which is
    ((c ^ (r & 7)) << 4) ^ (k << 5): from k to k only bits of the address flip.
    """
    row_bytes = 2 * head_size

    @device
    def left(tile, at, row, k):
        lane = cuda.threadIdx.x & 31
        mine = (lane & 15) * row_bytes + (((lane >> 4) ^ (lane & 7)) << 4)
        return ptx.load_flipped_matrices(tile, at + row * row_bytes + mine, k << 5)

    @device
    def right(tile, at, row, k):
        lane = cuda.threadIdx.x & 31
        of_row = (lane & 7) + ((lane >> 4) << 3)
        mine = of_row * row_bytes + ((((lane >> 3) & 1) ^ (lane & 7)) << 4)
        return ptx.load_flipped_matrices(tile, at + row * row_bytes + mine, k << 5)

    @device
    def across(tile, at, row, n):
        lane = cuda.threadIdx.x & 31
        mine = (lane & 15) * row_bytes + (((lane >> 4) ^ (lane & 7)) << 4)
        return ptx.load_flipped_matrices_transposed(tile, at + row * row_bytes + mine, n << 5)

    return left, right, across


@cache
def _arithmetic(kind: str) -> tuple[Any, Any]:
    """(add, as_left) of tiles of such numbers.

    add(sums, i, a, b0, b1)   sums[i] += A·B of a warp; sums is (results, 4)
    as_left(p, i)             two 16×8 results, 2i and 2i + 1, as A
    """
    is_half = kind == F16.name
    add, two = (ptx.add_tile_of_f16, ptx.two_f16) if is_half else (ptx.add_tile, ptx.two_bf16)

    @device
    def as_left(p, i):
        return (
            two(p[2 * i, 0], p[2 * i, 1]), two(p[2 * i, 2], p[2 * i, 3]),
            two(p[2 * i + 1, 0], p[2 * i + 1, 1]), two(p[2 * i + 1, 2], p[2 * i + 1, 3]),
        )  # fmt: skip

    return add, as_left


@cache
def sums_adder(head_size: int, n: int, in_groups: bool, kind: str = BF16.name) -> Any:
    """add(sums, p, tile, at): sums += P·B, P (16, n) of each warp as results lie, which are
    rounded, B (n, D) at byte `at`; in_groups: by four warps together."""
    if in_groups:
        return group_ptx.down_rows(head_size, n)
    (_, _, across), (add_product, as_left) = readers(head_size), _arithmetic(kind)

    @device
    def add(sums, p, tile, at):
        for j in range(n // 16):
            a = as_left(p, j)
            for c in range(head_size // 16):
                b = across(tile, at, 16 * j, c)
                add_product(sums, 2 * c, a, b[0], b[1])
                add_product(sums, 2 * c + 1, a, b[2], b[3])

    return add


@cache
def rows_holder(head_size: int, n_factors: int) -> Any:
    """hold(held, tile): of one or two first factors, which are on their way to the tile, a warp's
    rows. Behind it others may be copied there."""
    left, is_two, at_second = readers(head_size)[0], n_factors == 2, 2 * BR * head_size

    @device
    def hold_one(held, tile, at):
        for c in range(head_size // 16):
            words = left(tile, at, 16 * (cuda.threadIdx.x >> 5), c)
            held[c, 0], held[c, 1], held[c, 2], held[c, 3] = words

    @device
    def hold(held, tile):
        ptx.await_copies()
        cuda.syncthreads()
        hold_one(held[0], tile, 0)
        if is_two:
            hold_one(held[1], tile, at_second)
        cuda.syncthreads()

    return hold


def _multiplier_together(head_size: int, n: int, n_products: int) -> Any:
    lefts, by_rows = (
        (0, 2 * BR * head_size)[:n_products],
        group_ptx.by_rows(n, head_size, n_products),
    )

    @device
    def multiply(sums, held, tile, rights):
        by_rows(sums, tile, lefts, rights)

    return multiply


@cache
def rows_multiplier(
    head_size: int, n: int, in_groups: bool, n_products: int, is_held: bool, kind: str = BF16.name
) -> Any:
    """multiply(sums, held, tile, rights): of each of one or two products, sums = A·Bᵀ, B of n rows
    at these bytes of the tile. Of two, sums that wait for nothing of each other follow each other.

    A is held in registers (is_held), or lies in the tile, 64 rows at byte 0 and 64 behind them; so
    it does always by four warps together (in_groups).
    """
    if in_groups:
        return _multiplier_together(head_size, n, n_products)
    is_two, at_second = n_products == 2, 2 * BR * head_size
    (left, right, _), (add_product, _) = readers(head_size), _arithmetic(kind)

    @device
    def factor(held, tile, at, c):
        if is_held:
            return (held[c, 0], held[c, 1], held[c, 2], held[c, 3])
        return left(tile, at, 16 * (cuda.threadIdx.x >> 5), c)

    @device
    def multiply(sums, held, tile, rights):
        clear(sums[0], n // 8)
        if is_two:
            clear(sums[1], n // 8)
        for c in range(head_size // 16):
            a, second = factor(held[0], tile, 0, c), factor(held[-1], tile, at_second, c)
            for j in range(n // 16):
                b = right(tile, rights[0], 16 * j, c)
                if is_two:
                    d = right(tile, rights[1], 16 * j, c)
                add_product(sums[0], 2 * j, a, b[0], b[1])
                add_product(sums[0], 2 * j + 1, a, b[2], b[3])
                if is_two:
                    add_product(sums[1], 2 * j, second, d[0], d[1])
                    add_product(sums[1], 2 * j + 1, second, d[2], d[3])

    return multiply


@device
def clear(sums, n):
    for i in range(n):
        for e in range(4):
            sums[i, e] = np.float32(0)


@device
def scale_rows(sums, n, share, other):
    """Rows g and g + 8 of n columns of eight."""
    for i in range(n):
        sums[i, 0] *= share
        sums[i, 1] *= share
        sums[i, 2] *= other
        sums[i, 3] *= other


@device
def write_rows(out, sums, row, n_rows, head, n_heads, head_size, put, first):
    """The lane's numbers of rows `row` and `row` + 8, of a matrix that begins at row `first`."""
    for r in range(2):
        if row + 8 * r < n_rows:
            at = (np.int64(first + row + 8 * r) * n_heads + head) * head_size
            at += (cuda.threadIdx.x & 3) << 1
            for i in range(head_size // 8):
                put(out, at + 8 * i, sums[i, 2 * r], sums[i, 2 * r + 1])


@device
def seen_by_rows(span, first, count, n_keys):
    """The first key that any of `count` queries sees, and the one past the last; by a warp."""
    start, stop = np.int32(n_keys), np.int32(0)
    for row in range(cuda.threadIdx.x & 31, count, 32):
        one = max(span[2 * (first + row)], np.int32(0))
        other = min(span[2 * (first + row) + 1], np.int32(n_keys))
        if one < other:
            start, stop = min(start, one), max(stop, other)
    for step in (16, 8, 4, 2, 1):
        start = min(start, np.int32(cuda.shfl_xor_sync(0xFFFFFFFF, start, step)))
        stop = max(stop, np.int32(cuda.shfl_xor_sync(0xFFFFFFFF, stop, step)))
    return start, stop


@device
def _begins(span, row, n):
    """Whether a tile begins with a row: the first of every 64, and those that see no key that the
    row before sees, as where another sequence begins. Rows that see none are with those before."""
    if row >= n or row % BR == 0:
        return np.int32(row < n)
    start, stop = span[2 * row], span[2 * row + 1]
    is_apart = start >= span[2 * row - 1] or stop <= span[2 * row - 2]
    return np.int32(start < stop and is_apart)


@device
def _nth_beginning(span, row, k, n):
    """The row with which the k-th tile begins of those from `row` on; n if there is none."""
    while row < n:
        begins = _begins(span, row + cuda.threadIdx.x, n)
        here = cuda.syncthreads_count(begins)
        if k < here:
            at, step = 0, THREADS // 2
            while step:
                is_before = np.int32(cuda.threadIdx.x < at + step)
                at += step if cuda.syncthreads_count(begins & is_before) <= k else 0
                step //= 2
            return row + at
        k, row = k - here, row + THREADS
    return n


@device
def rows_of_sequences(span, number, n):
    """The first row of tile `number`, and the one past its last; n twice beyond the last tile."""
    first = _nth_beginning(span, 0, number, n)
    return first, _nth_beginning(span, first, 1, n)
