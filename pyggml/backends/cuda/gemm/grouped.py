"""Products with one weight per expert, of many rows: each expert's rows make tiles on tensor cores.

    forward    C[r] = x[r] · w[e]ᵀ          backward    C[r] = dy[r] · w[e]          e = ids[r]

`order` sorts the rows by expert, on the card, so that ids never leave it. Then a block takes a tile
of an expert's rows and some columns of C. Packed weights, 256 of each row of w, are copied to
shared memory a step ahead, and unpacked there to bfloat16 while A's rows are gathered. Chunks of 8
numbers are exchanged by their row's number, so that eight rows of a column lie in different banks.
All is bound by its instructions: what a thread needs in each step is found before the first.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.code import byte_ptx, ptx
from pyggml.backends.cuda.code.jit import device, kernel, most_shared
from pyggml.backends.cuda.code.warp import LANES
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.launches import launch
from pyggml.backends.cuda.weights.readers import eights_of, weight_of
from pyggml.graph.call import Call
from pyggml.graph.dtypes import DTYPES
from pyggml.quants.layout import GROUP
from pyggml.sizes import round_up

THREADS, _WARPS = 256, 8
_SORTERS, _SORTING_WARPS = 512, 16
_COUNTS = _SORTING_WARPS + 1
ACROSS = 256  # weights of a row of w that are unpacked at once
_EIGHT = 8  # numbers of a chunk of 16 bytes
_ZERO = np.float32(0)


class GroupedTile(NamedTuple):
    """What a block multiplies at once.

    rows         of A
    of_w         rows of w
    is_forward   whether the sum runs along w's rows of numbers, else down them
    warps_down   warps that share the columns of C; the others share its rows
    """

    rows: int
    of_w: int
    is_forward: bool
    warps_down: int

    @property
    def depth(self) -> int:
        """Numbers of a sum."""
        return ACROSS if self.is_forward else self.of_w

    @property
    def columns(self) -> int:
        """Columns of C."""
        return self.of_w if self.is_forward else ACROSS

    @property
    def w_at(self) -> int:
        """Where the unpacked weights begin in shared memory, in bytes; before them is A."""
        return 2 * self.rows * self.depth

    @property
    def numbers_at(self) -> int:
        """Where the numbers of C's rows begin."""
        return self.w_at + 2 * self.of_w * ACROSS

    @property
    def packed_at(self) -> int:
        """Where the packed weights begin, of two steps."""
        return self.numbers_at + 4 * self.rows

    def n_bytes(self, name: str) -> int:
        """Of shared memory, for weights of this type."""
        return self.packed_at + 2 * self.of_w * _packed_row(name)


def _at_once(name: str) -> int:
    """Weights of a row that are unpacked together."""
    return max(DTYPES[name].block, _EIGHT)


def _packed_row(name: str) -> int:
    """Bytes of 256 packed weights in shared memory: they may begin in the middle of 16."""
    return round_up(DTYPES[name].row_bytes(ACROSS), 16) + 16


# Few rows of an expert let blocks share a multiprocessor; many repay what is unpacked, which each
# tile of an expert's rows does anew. The fastest of some on an H100.
_FORWARD = GroupedTile(64, 64, True, 2), GroupedTile(128, 128, True, 2)
_BACKWARD = GroupedTile(64, 64, False, 2), GroupedTile(128, 64, False, 2)
_FEW = 48  # rows of an expert, on average


def tile_of(name: str, is_forward: bool, n_rows: int, n_experts: int) -> GroupedTile:
    """The tile for so many rows in all, and weights of this type."""
    few, many = _FORWARD if is_forward else _BACKWARD
    return many if n_rows > _FEW * n_experts and many.n_bytes(name) <= most_shared() else few


# -- the order of rows --------------------------------------------------------------------------


@partial(kernel, most_threads=_SORTERS)
def _order(places, starts, c, ids, n_experts, width, fault, number):
    """places: the numbers of the rows by expert, in order; starts[e]: where those of e begin. A
    block for each expert. Of a row without an expert the result is 0, and the fault is noted."""
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
            for j in range(width):
                c[np.int64(i) * width + j] = _ZERO
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


def order_call(places: Any, starts: Any, c: Any, ids: Any, width: int, fault: Any, of: Any) -> Call:
    """The launch of `order`. of: (experts, stream)"""
    n_experts, stream = of
    arguments = places, starts, c, ids, n_experts, width, *fault
    return launch(_order, n_experts, _SORTERS, stream, *arguments)


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


def _n_tiles(n_rows: int, n_experts: int, rows: int) -> int:
    return n_rows // rows + n_experts


# -- tiles --------------------------------------------------------------------------------------


@cache
def _copier(name: str, tile: GroupedTile) -> Any:
    """copy(memory, place, w, first, n_rows, n_left): the packed weights of a step, to the first or
    second place. first: the byte where those of the thread's row begin; n_left: weights of a row
    left."""
    row_size, block, block_bytes = _packed_row(name), DTYPES[name].block, DTYPES[name].block_bytes
    together, of_w, packed_at = THREADS // tile.of_w, tile.of_w, tile.packed_at
    n_chunks = -(-row_size // 16 // together)

    @device
    def copy(memory, place, w, first, n_rows, n_left):
        row, lane = cuda.threadIdx.x // together, cuda.threadIdx.x % together
        to = packed_at + (place * of_w + row) * row_size + 16 * lane
        at = (first & ~np.int64(15)) + 16 * lane
        if row < n_rows:
            end = first + min(ACROSS, n_left) // block * block_bytes
            for i in range(n_chunks):
                if at < end:
                    n_bytes = w.size - at  # of 16; the last of the array may be fewer
                    n_bytes = np.int32(16) if n_bytes >= 16 else np.int32(n_bytes)
                    ptx.copy_16(memory, to + 16 * together * i, w, at, n_bytes)
                at += 16 * together
        ptx.commit_copies()

    return copy


@cache
def _unpacker(name: str, tile: GroupedTile) -> Any:
    """unpack(memory, place, first, n_rows, n_left): what `copy` brought; zeros where it brought
    nothing. A thread takes the same columns of some rows."""
    at_once, row_size, w_at = _at_once(name), _packed_row(name), tile.w_at
    pieces, per_row = min(at_once, GROUP) // _EIGHT, ACROSS // at_once
    step = at_once // DTYPES[name].block * DTYPES[name].block_bytes
    of_w, packed_at, together = tile.of_w, tile.packed_at, THREADS // (per_row * pieces)
    put = _put
    eights = eights_of(name, put) if DTYPES[name].block > 1 else _eights_of_plain(name, put)

    @device
    def unpack(memory, place, start, row_bytes, n_rows, n_left):
        task = cuda.threadIdx.x % (per_row * pieces)
        piece, of_row = task % pieces, task // pieces
        is_here = of_row * at_once < n_left
        column = of_row * at_once * 2 + piece * 16
        for i in range(of_w // together):
            row = cuda.threadIdx.x // (per_row * pieces) + i * together
            to = memory, (w_at + row * 2 * ACROSS) ^ (column ^ ((row & 7) << 4))
            if is_here and row < n_rows:
                at = packed_at + (place * of_w + row) * row_size + of_row * step
                skew = np.int32(start + row * row_bytes) & np.int32(15)
                eights(to, 0, memory, at + skew, np.int64(piece * _EIGHT))
            else:
                for group in range(0, at_once, GROUP):
                    put(to, group, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO)

    return unpack


@device
def _put(to, i, a, b, c, d, e, f, g, h):
    """Eight weights in bfloat16 to the chunk of group i // 32, from the chunk of the first one on:
    chunks of groups are four apart, which turns bits of the address that no other does."""
    memory, at = to
    byte_ptx.put_shared_words(
        memory, at ^ ((i & ~(GROUP - 1)) << 1),
        ptx.two_bf16(a, b), ptx.two_bf16(c, d), ptx.two_bf16(e, f), ptx.two_bf16(g, h),
    )  # fmt: skip


def _eights_of_plain(name: str, put: Any) -> Any:
    """`eights` of a type without blocks."""
    weight, size = weight_of(name), DTYPES[name].block_bytes

    @device
    def eights(out, i, raw, at, lane):
        put(
            out, i,
            weight(raw, at, 0), weight(raw, at + size, 0),
            weight(raw, at + 2 * size, 0), weight(raw, at + 3 * size, 0),
            weight(raw, at + 4 * size, 0), weight(raw, at + 5 * size, 0),
            weight(raw, at + 6 * size, 0), weight(raw, at + 7 * size, 0),
        )  # fmt: skip

    return eights


@cache
def _row_taker(tile: GroupedTile) -> Any:
    """take_rows(numbers, places, first, n_left): the numbers of the tile's rows of C; -1 behind the
    expert's last."""
    n_rows, numbers_at = tile.rows, tile.numbers_at // 4

    @device
    def take_rows(numbers, places, first, n_left):
        i = cuda.threadIdx.x
        if i < n_rows:
            numbers[numbers_at + i] = places[first + i] if i < n_left else np.int32(-1)

    return take_rows


@cache
def _gatherer(tile: GroupedTile) -> tuple[Any, Any]:
    """(find, gather): a thread copies the same chunk of some rows of A.

    find(rows, numbers, k, rows_of_a)     rows: where the thread's rows of A (…, k) begin, -1: none
    gather(memory, rows, a, first, k)     numbers first … of them in bfloat16; zeros outside
    """
    depth, chunks, numbers_at = tile.depth, tile.depth // _EIGHT, tile.numbers_at // 4
    together, n = THREADS // chunks, tile.rows * chunks // THREADS

    @device
    def find(rows, numbers, k, rows_of_a):
        for i in range(n):
            number = numbers[numbers_at + cuda.threadIdx.x // chunks + i * together]
            row_of_a = np.uint32(number) // np.uint32(rows_of_a)
            rows[i] = np.int64(row_of_a) * k if number >= 0 else np.int64(-1)

    @device
    def gather(memory, rows, a, first, k):
        row, chunk = cuda.threadIdx.x // chunks, cuda.threadIdx.x % chunks
        at = first + _EIGHT * chunk
        n_bytes = np.int32(16) if at < k else np.int32(0)  # 8 divides k
        to = row * 2 * depth + ((chunk ^ (row & 7)) << 4)  # 8 divides `together`
        for i in range(n):
            some = n_bytes if rows[i] >= 0 else np.int32(0)  # then the address does not matter
            ptx.copy_16(memory, to + i * together * 2 * depth, a, 2 * (rows[i] + at), some)
        ptx.commit_copies()

    return find, gather


@cache
def _multiplier(tile: GroupedTile, down: int, across: int) -> Any:
    """multiply(sums, memory, row, column): `down` tiles of 16 rows and `across` of 16 columns.

    Chunk c of row r lies at ((c ^ (r & 7)) << 4) of its row. A lane's rows are alike in r & 7, so
    its chunks 2i + h, i from 0 to 3, lie at the four `turns` of (h ^ (r & 7)), and those eight
    chunks on 128 bytes on.
    """
    depth, w_at = tile.depth, tile.w_at
    assert depth % 64 == 0 and (tile.is_forward or across % 4 == 0), f"{tile} has parts of turns"
    of_a, of_w = 2 * depth, 2 * ACROSS  # bytes of a row

    @device
    def add(sums, i, a, b0, b1):
        c = sums[i, 0], sums[i, 1], sums[i, 2], sums[i, 3]
        sums[i, 0], sums[i, 1], sums[i, 2], sums[i, 3] = ptx.multiply_tile(c, a, b0, b1)

    @device
    def add_two(sums, i, a, b):
        add(sums, 2 * i, a, b[0], b[1])
        add(sums, 2 * i + 1, a, b[2], b[3])

    @device
    def step(sums, memory, at, b_at):
        """Sixteen numbers of the sum, where rows of w are columns of C."""
        for i in range(down):
            a = ptx.load_matrices(memory, at + 16 * of_a * i)
            for j in range(across):
                add_two(sums, i * across + j, a, ptx.load_matrices(memory, b_at + 16 * of_w * j))

    @device
    def forward(sums, memory, row, column):
        lane = cuda.threadIdx.x & 31
        a_at = (row + (lane & 15)) * of_a
        b_at = w_at + (column + (lane & 7) + ((lane >> 4) << 3)) * of_w
        a, b = turns((lane >> 4) ^ (lane & 7)), turns(((lane >> 3) & 1) ^ (lane & 7))
        for _ in range(depth // 64):
            step(sums, memory, a_at + a[0], b_at + b[0])
            step(sums, memory, a_at + a[1], b_at + b[1])
            step(sums, memory, a_at + a[2], b_at + b[2])
            step(sums, memory, a_at + a[3], b_at + b[3])
            a_at, b_at = a_at + 128, b_at + 128

    @device
    def step_back(sums, memory, at, b_at, b):
        """The same where rows of w are numbers of the sum."""
        for i in range(down):
            a = ptx.load_matrices(memory, at + 16 * of_a * i)
            for j in range(across // 4):
                for_j = b_at + 128 * j
                first = ptx.load_matrices_transposed(memory, for_j + b[0])
                second = ptx.load_matrices_transposed(memory, for_j + b[1])
                third = ptx.load_matrices_transposed(memory, for_j + b[2])
                fourth = ptx.load_matrices_transposed(memory, for_j + b[3])
                add_two(sums, i * across + 4 * j, a, first)
                add_two(sums, i * across + 4 * j + 1, a, second)
                add_two(sums, i * across + 4 * j + 2, a, third)
                add_two(sums, i * across + 4 * j + 3, a, fourth)

    @device
    def backward(sums, memory, row, column):
        lane = cuda.threadIdx.x & 31
        at = (row + (lane & 15)) * of_a
        b_at = w_at + (lane & 15) * of_w + 2 * column
        turned = turns((lane >> 4) ^ (lane & 7))
        for _ in range(depth // 64):
            step_back(sums, memory, at + turned[0], b_at, turned)
            step_back(sums, memory, at + turned[1], b_at + 16 * of_w, turned)
            step_back(sums, memory, at + turned[2], b_at + 32 * of_w, turned)
            step_back(sums, memory, at + turned[3], b_at + 48 * of_w, turned)
            at, b_at = at + 128, b_at + 64 * of_w

    return forward if tile.is_forward else backward


@device
def turns(turned):
    return turned << 4, (turned ^ 2) << 4, (turned ^ 4) << 4, (turned ^ 6) << 4


@cache
def _writer(tile: GroupedTile, down: int, across: int) -> Any:
    numbers_at = tile.numbers_at // 4

    @device
    def write(c, sums, numbers, row, column, width):
        """column: of C, of the warp's first; a lane has two neighbours of each eight from there."""
        lane = cuda.threadIdx.x & 31
        column += (lane & 3) << 1
        for i in range(2 * down):
            number = numbers[numbers_at + row + 8 * i + (lane >> 2)]
            if number >= 0:
                at = 4 * (np.int64(number) * width + column)
                for j in range(2 * across):
                    if column + 8 * j < width:
                        of, e = i // 2 * 2 * across + j, 2 * (i & 1)
                        first, second = ptx.bits_of(sums[of, e]), ptx.bits_of(sums[of, e + 1])
                        ptx.store_pair(c, at + 32 * j, first, second)

    return write


@cache
def _kernel(name: str, tile: GroupedTile) -> Any:
    warps_down, n_rows, depth, columns = tile.warps_down, tile.rows, tile.depth, tile.columns
    high, wide = n_rows // warps_down, columns * warps_down // _WARPS
    down, across = high // 16, wide // 16
    copy, unpack, (find, gather) = _copier(name, tile), _unpacker(name, tile), _gatherer(tile)
    multiply, write = _multiplier(tile, down, across), _writer(tile, down, across)
    find_tile = _tile_finder(n_rows)
    n_sums, take_rows, is_forward = 2 * down * across, _row_taker(tile), tile.is_forward
    block, block_bytes = DTYPES[name].block, DTYPES[name].block_bytes
    n_gathered, together = n_rows * depth // _EIGHT // THREADS, THREADS // tile.of_w

    @device
    def part(of_w, row_bytes, to, at, n, k):
        """(byte where a step's weights begin, rows, weights of a row) from column `to` of C and
        number `at` of its sums on."""
        if is_forward:
            return of_w + to * row_bytes + at // block * block_bytes, n - to, k - at
        return of_w + at * row_bytes + to // block * block_bytes, n - at, k - to

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
        of_w, length, width = expert * n * row_bytes, k, n
        if not is_forward:
            length, width = n, k
        for i in range(n_sums):
            for e in range(4):
                sums[i, e] = _ZERO
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
    """The launch: C of all rows. a in bfloat16, of which `rows_of_a` rows of C take one row each;
    sizes (experts, n, k) of w, whose type has this name."""
    n_experts, n, k = sizes
    n_tiles = _n_tiles(places.size, n_experts, tile.rows)
    grid = -(-(n if tile.is_forward else k) // tile.columns), n_tiles
    arguments = c, a, w, places, starts, n, k, rows_of_a, n_experts
    run = _kernel(name, tile)
    return launch(run, grid, THREADS, stream, *arguments, shared_bytes=tile.n_bytes(name))
