"""Products with one weight per expert, of many rows: each expert's rows make tiles on tensor cores.

    forward    C[r] = x[r] · w[e]ᵀ          backward    C[r] = dy[r] · w[e]          e = ids[r]

`order` sorts the rows by expert, on the card, so that ids never leave it. Then a block takes a tile
of an expert's rows and some columns of C (grouped_tile.py).
"""

from functools import cache, partial
from typing import Any

import numpy as np

from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.jit import device, kernel, most_shared
from pyggml.backends.cuda.code.warp import LANES
from pyggml.backends.cuda.gemm.grouped_tile import (
    THREADS,
    GroupedTile,
    copier,
    gatherer,
    multiplier,
    row_taker,
    unpacker,
    writer,
)
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.launches import launch
from pyggml.graph.call import Call
from pyggml.graph.dtypes import DTYPES

_WARPS = 8
_SORTERS, _SORTING_WARPS = 512, 16
_COUNTS = _SORTING_WARPS + 1

# Few rows of an expert let blocks share a multiprocessor; many repay what is unpacked, which each
# tile of an expert's rows does anew. The fastest of some on an H100, then one for less memory.
_FORWARD = (
    GroupedTile(128, 128, True, 2),
    GroupedTile(64, 64, True, 2),
    GroupedTile(64, 32, True, 4),
)
_BACKWARD = (
    GroupedTile(128, 64, False, 2),
    GroupedTile(64, 64, False, 2),
    GroupedTile(64, 64, False, 2, places=1),
)
_FEW = 48  # rows of an expert, on average


def tile_of(name: str, is_forward: bool, n_rows: int, n_experts: int) -> GroupedTile | None:
    """The tile for so many rows in all, and weights of this type; None if the card's blocks have
    less shared memory than the smallest takes."""
    tiles = _FORWARD if is_forward else _BACKWARD
    first = 0 if n_rows > _FEW * n_experts else 1
    return next((tile for tile in tiles[first:] if tile.n_bytes(name) <= most_shared()), None)


# -- the order of rows --------------------------------------------------------------------------


@partial(kernel, most_threads=_SORTERS)
def _order(places, starts, ids, n_experts, fault, number):
    """places: the numbers of the rows by expert, in order; starts[e]: where those of e begin. A
    block for each expert. An id that is no expert is a fault, and its row has no place."""
    counts = cuda.shared.array(_COUNTS, np.int32)
    lane, warp = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
    expert, n = np.int32(cuda.blockIdx.x), ids.size
    if cuda.threadIdx.x == 0:
        counts[_SORTING_WARPS] = 0
    cuda.syncthreads()
    below = np.int32(0)
    for i in range(cuda.threadIdx.x, n, _SORTERS):
        if 0 <= ids[i] < expert:
            below += np.int32(1)
        elif expert == 0 and not 0 <= ids[i] < n_experts:
            cuda.atomic.max(fault, 0, number)
    cuda.atomic.add(counts, _SORTING_WARPS, below)
    cuda.syncthreads()
    place = counts[_SORTING_WARPS]
    if cuda.threadIdx.x == 0:
        starts[expert] = place
    for first in range(0, n, _SORTERS):
        i = first + cuda.threadIdx.x
        is_own = i < n and ids[i] == expert
        own = cuda.ballot_sync(0xFFFFFFFF, is_own)
        if lane == 0:
            counts[warp] = cuda.popc(own)
        cuda.syncthreads()
        before = cuda.popc(own & ((np.uint32(1) << np.uint32(lane)) - np.uint32(1)))
        for w in range(_SORTING_WARPS):
            if w < warp:
                before += counts[w]
        if is_own:
            places[place + before] = i
        for w in range(_SORTING_WARPS):
            place += counts[w]
        cuda.syncthreads()
    if cuda.threadIdx.x == 0 and expert == n_experts - 1:
        starts[n_experts] = place


def order_call(places: Any, starts: Any, ids: Any, n_experts: int, fault: Any, stream: Any) -> Call:
    """The launch of `order`."""
    cell, number = fault
    return launch(_order, n_experts, _SORTERS, stream, places, starts, ids, n_experts, cell, number)


@cache
def _tile_finder(rows: int) -> Any:
    """find(starts, n_experts, number): (expert, its first row) of the block's tile; a row past the
    expert's last if there is no such tile.

    The first of the tiles of expert e has number starts[e] // rows + e: then all have room.
    """

    @device
    def find(starts, n_experts, number):
        expert = np.int32(-1)
        for first in range(0, n_experts, THREADS):
            e = first + cuda.threadIdx.x
            begins = e < n_experts and starts[e] // rows + e <= number
            expert += cuda.syncthreads_count(np.int32(1) if begins else np.int32(0))
        start = starts[expert]
        return np.int64(expert), start + (number - start // rows - expert) * rows

    return find


# -- products ------------------------------------------------------------------------------------


@cache
def _part_of(name: str, is_forward: bool) -> Any:
    block, block_bytes = DTYPES[name].block, DTYPES[name].block_bytes

    @device
    def part(of_w, row_bytes, to, at, n, k):
        """(byte where a step's weights begin, rows, weights of a row) from column `to` of C and
        number `at` of its sums on."""
        if is_forward:
            return of_w + to * row_bytes + at // block * block_bytes, n - to, k - at
        return of_w + at * row_bytes + to // block * block_bytes, n - at, k - to

    return part


@cache
def _kernel(name: str, tile: GroupedTile, rounds: bool) -> Any:
    warps_down, n_rows, depth, columns = tile.warps_down, tile.rows, tile.depth, tile.columns
    high, wide = n_rows // warps_down, columns * warps_down // _WARPS
    down, across = high // 16, wide // 16
    copy, unpack, (find, gather) = copier(name, tile), unpacker(name, tile), gatherer(tile)
    multiply, write = multiplier(tile, down, across), writer(tile, down, across, rounds)
    find_tile, part = _tile_finder(n_rows), _part_of(name, tile.is_forward)
    n_sums, take_rows, is_forward = 2 * down * across, row_taker(tile), tile.is_forward
    block, block_bytes = DTYPES[name].block, DTYPES[name].block_bytes
    n_gathered, together, is_one_place = tile.rows_of_thread, THREADS // tile.of_w, tile.places == 1

    def product(c, a, w, places, starts, n, k, rows_of_a, n_experts):
        memory = cuda.shared.array(0, np.uint8)
        numbers = cuda.shared.array(0, np.int32)
        sums = cuda.local.array((n_sums, 4), np.float32)
        rows = cuda.local.array(n_gathered, np.int64)
        expert, start = find_tile(starts, n_experts, np.int32(cuda.blockIdx.y))
        count = starts[expert + 1] - start
        if count <= 0:
            return
        warp, to = cuda.threadIdx.x >> 5, np.int64(cuda.blockIdx.x) * columns
        row, column = warp % warps_down * high, warp // warps_down * wide
        row_bytes = k // block * block_bytes
        of_thread = np.int64(cuda.threadIdx.x // together) * row_bytes
        of_w = expert * n * row_bytes
        length, width = (k, n) if is_forward else (n, k)
        for i in range(n_sums):
            for e in range(4):
                sums[i, e] = ZERO
        take_rows(numbers, places, start, count)
        begin, n_left, k_left = part(of_w, row_bytes, to, 0, n, k)
        copy(memory, 0, w, begin + of_thread, n_left, k_left)
        cuda.syncthreads()
        find(rows, numbers, length, rows_of_a)
        place = 0
        for at in range(0, length, depth):
            gather(memory, rows, a, at, length)
            begin, n_left, k_left = part(of_w, row_bytes, to, at, n, k)
            ahead, n_ahead, k_ahead = part(of_w, row_bytes, to, at + depth, n, k)
            if is_one_place:
                ptx.await_all_but_one()
                cuda.syncthreads()
                unpack(memory, 0, begin, row_bytes, n_left, k_left)
                cuda.syncthreads()
                copy(memory, 0, w, ahead + of_thread, n_ahead, k_ahead)
            else:
                copy(memory, 1 - place, w, ahead + of_thread, n_ahead, k_ahead)
                ptx.await_all_but_two()
                cuda.syncthreads()
                unpack(memory, place, begin, row_bytes, n_left, k_left)
            ptx.await_all_but_one()
            cuda.syncthreads()
            multiply(sums, memory, row, column)
            cuda.syncthreads()
            place = 1 - place
        ptx.await_copies()
        write(c, sums, numbers, row, to + column, width)

    shared_bytes, least = tile.n_bytes(name), 2 if tile.rows <= 64 else 1
    return kernel(product, THREADS, shared_bytes, least_blocks=least)


def product_call(
    name: str, tile: GroupedTile, sizes: tuple[int, int, int], rows_of_a: int, stream: Any,
    c: Any, a: Any, w: Any, places: Any, starts: Any,
) -> Call:  # fmt: skip
    """The launch: C of all rows, float32 or, as uint16, bfloat16. a in bfloat16, of which
    `rows_of_a` rows of C take one row each; sizes (experts, n, k) of w, whose type has this
    name."""
    n_experts, n, k = sizes
    n_tiles = places.size // tile.rows + n_experts
    grid = -(-(n if tile.is_forward else k) // tile.columns), n_tiles
    return launch(
        _kernel(name, tile, c.dtype != np.float32), grid, THREADS, stream, c, a, w, places, starts,
        n, k, rows_of_a, n_experts, shared_bytes=tile.n_bytes(name),
    )  # fmt: skip
