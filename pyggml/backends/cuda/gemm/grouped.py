"""Products with one weight per expert, of many rows: each expert's rows make tiles on tensor cores.

    forward    C[r] = x[r] · w[e]ᵀ          backward    C[r] = dy[r] · w[e]          e = ids[r]

`order` sorts the rows by expert, on the card, so that ids never leave it. Then a block takes an
expert and some columns of C. It goes through the expert's rows a tile at a time. Packed weights,
256 of each row of w, are copied to shared memory a step ahead, and unpacked there to bfloat16 while
A's rows are gathered. Chunks of 8 numbers are exchanged by their row's number, so that eight rows
of a column lie in different banks. Loops count in unsigned numbers of 32 bits, for unpacking is
bound by its instructions.
"""

from functools import cache
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
_COUNTS = _WARPS + 1
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
        """Where the numbers of C's rows begin; behind them are those of A's."""
        return self.w_at + 2 * self.of_w * ACROSS

    @property
    def packed_at(self) -> int:
        """Where the packed weights begin, of two steps."""
        return self.numbers_at + 8 * self.rows

    def n_bytes(self, name: str) -> int:
        """Of shared memory, for weights of this type."""
        return self.packed_at + 2 * self.of_w * _packed_row(name)


def _at_once(name: str) -> int:
    """Weights of a row that are unpacked together."""
    return max(DTYPES[name].block, _EIGHT)


def _packed_row(name: str) -> int:
    """Bytes of 256 packed weights in shared memory: they may begin in the middle of 16."""
    return round_up(DTYPES[name].row_bytes(ACROSS), 16) + 16


# Few rows of an expert let blocks share a multiprocessor; many repay what is unpacked.
_FORWARD = GroupedTile(32, 64, True, 2), GroupedTile(128, 128, True, 2)
_BACKWARD = GroupedTile(32, 64, False, 1), GroupedTile(64, 64, False, 2)
_FEW = 48  # rows of an expert, on average


def tile_of(name: str, is_forward: bool, n_rows: int, n_experts: int) -> GroupedTile:
    """The tile for so many rows in all, and weights of this type."""
    few, many = _FORWARD if is_forward else _BACKWARD
    return many if n_rows > _FEW * n_experts and many.n_bytes(name) <= most_shared() else few


# -- the order of rows --------------------------------------------------------------------------


@kernel
def _order(places, starts, c, ids, n_experts, width, fault, number):
    """places: the numbers of the rows by expert, in order; starts[e]: where those of e begin. A
    block for each expert. Of a row without an expert the result is 0, and the fault is noted."""
    counts = cuda.shared.array(_COUNTS, np.int32)
    lane, warp = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
    expert, n = np.int32(cuda.blockIdx.x), ids.size
    if cuda.threadIdx.x == 0:
        counts[_WARPS] = 0
    cuda.syncthreads()
    below = np.int32(0)
    for i in range(cuda.threadIdx.x, n, THREADS):
        if 0 <= ids[i] < expert:
            below += np.int32(1)
        elif expert == 0 and not 0 <= ids[i] < n_experts:
            cuda.atomic.max(fault, 0, number)
            for j in range(width):
                c[np.int64(i) * width + j] = _ZERO
    cuda.atomic.add(counts, _WARPS, below)
    cuda.syncthreads()
    place = counts[_WARPS]
    if cuda.threadIdx.x == 0:
        starts[expert] = place
    for first in range(0, n, THREADS):
        i = first + cuda.threadIdx.x
        is_own = i < n and ids[i] == expert
        own = cuda.ballot_sync(0xFFFFFFFF, is_own)
        if lane == 0:
            counts[warp] = cuda.popc(own)
        cuda.syncthreads()
        before = cuda.popc(own & ((np.uint32(1) << np.uint32(lane)) - np.uint32(1)))
        for w in range(_WARPS):
            if w < warp:
                before += counts[w]
        if is_own:
            places[place + before] = i
        for w in range(_WARPS):
            place += counts[w]
        cuda.syncthreads()
    if cuda.threadIdx.x == 0 and expert == n_experts - 1:
        starts[n_experts] = place


def order_call(places: Any, starts: Any, c: Any, ids: Any, width: int, fault: Any, of: Any) -> Call:
    """The launch of `order`. of: (experts, stream)"""
    n_experts, stream = of
    arguments = places, starts, c, ids, n_experts, width, *fault
    return launch(_order, n_experts, THREADS, stream, *arguments)


# -- tiles --------------------------------------------------------------------------------------


@device
def _of_a(row, chunk, depth):
    """The byte of a chunk in the tile of A."""
    return row * 2 * depth + ((chunk ^ (row & 7)) << 4)


@device
def _of_w(row, chunk):
    """The byte of a chunk in the tile of w, where a row has 512."""
    row, chunk = np.uint32(row), np.uint32(chunk)
    place = (row << np.uint32(9)) + ((chunk ^ (row & np.uint32(7))) << np.uint32(4))
    return np.int64(place)


@cache
def _copier(name: str, tile: GroupedTile) -> Any:
    """copy(memory, place, w, start, row_bytes, n_rows, n_left): the packed weights of a step, to
    the first or second place. start: the byte of the first row's; n_left: weights of a row left."""
    row, block, block_bytes = _packed_row(name), DTYPES[name].block, DTYPES[name].block_bytes
    chunks, of_w, packed_at = row // 16, tile.of_w, tile.packed_at

    @device
    def copy(memory, place, w, start, row_bytes, n_rows, n_left):
        n_bytes = min(ACROSS, n_left) // block * block_bytes
        e = np.uint32(cuda.threadIdx.x)
        while e < np.uint32(of_w * chunks):
            i, chunk = e // np.uint32(chunks), e % np.uint32(chunks)
            first = start + np.int64(i) * row_bytes
            at = (first & ~np.int64(15)) + 16 * np.int64(chunk)
            if i < n_rows and at < first + n_bytes:
                left = np.int32(min(16, w.size - at))
                to = packed_at + (place * of_w + np.int64(i)) * row + 16 * np.int64(chunk)
                ptx.copy_16(memory, to, w, at, left)
            e += np.uint32(THREADS)
        ptx.commit_copies()

    return copy


@cache
def _unpacker(name: str, tile: GroupedTile) -> Any:
    """unpack(memory, place, start, row_bytes, n_rows, n_left): what `copy` brought; zeros where it
    brought nothing."""
    at_once, row_size, w_at = _at_once(name), _packed_row(name), tile.w_at
    pieces, per_row = min(at_once, GROUP) // _EIGHT, ACROSS // at_once
    step = at_once // DTYPES[name].block * DTYPES[name].block_bytes
    of_w, packed_at, n_tasks = tile.of_w, tile.packed_at, tile.of_w * per_row * pieces

    @device
    def put(memory, i, a, b, c, d, e, f, g, h):
        at = w_at + _of_w(
            np.uint32(i) >> np.uint32(8), (np.uint32(i) >> np.uint32(3)) & np.uint32(31)
        )
        byte_ptx.put_shared_words(
            memory, at,
            ptx.two_bf16(a, b), ptx.two_bf16(c, d), ptx.two_bf16(e, f), ptx.two_bf16(g, h),
        )  # fmt: skip

    eights = eights_of(name, put) if DTYPES[name].block > 1 else _eights_of_plain(name, put)

    @device
    def unpack(memory, place, start, row_bytes, n_rows, n_left):
        task = np.uint32(cuda.threadIdx.x)
        while task < np.uint32(n_tasks):
            piece, number = task % np.uint32(pieces), task // np.uint32(pieces)
            row, of_row = np.int64(number // np.uint32(per_row)), number % np.uint32(per_row)
            i, lane = row * ACROSS + np.int64(of_row) * at_once, np.int64(piece) * _EIGHT
            if row < n_rows and np.int64(of_row) * at_once < n_left:
                at = packed_at + (place * of_w + row) * row_size + np.int64(of_row) * step
                eights(memory, i, memory, at + ((start + row * row_bytes) & 15), lane)
            else:
                for group in range(0, at_once, GROUP):
                    to = i + group + lane
                    put(memory, to, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO)
            task += np.uint32(THREADS)

    return unpack


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
    n_rows, numbers_at = tile.rows, tile.numbers_at // 4

    @device
    def take_rows(numbers, places, first, n_left, rows_of_a):
        """The numbers of the tile's rows of C and of A; -1 behind the expert's last."""
        i = cuda.threadIdx.x
        if i < n_rows:
            number = np.int32(-1)
            if i < n_left:
                number = places[first + i]
            numbers[numbers_at + i] = number
            numbers[numbers_at + n_rows + i] = number // rows_of_a if number >= 0 else np.int64(-1)

    return take_rows


@cache
def _gatherer(tile: GroupedTile) -> Any:
    depth, chunks, n_chunks = tile.depth, tile.depth // _EIGHT, tile.rows * tile.depth // _EIGHT
    numbers_at, tile_rows = tile.numbers_at // 4, tile.rows

    @device
    def gather(memory, numbers, a, first, k):
        """Numbers first … of the tile's rows of A (…, k) in bfloat16; zeros outside."""
        e = np.uint32(cuda.threadIdx.x)
        while e < np.uint32(n_chunks):
            row, chunk = np.int64(e // np.uint32(chunks)), np.int64(e % np.uint32(chunks))
            number = numbers[np.uint32(numbers_at + tile_rows + row)]
            left = k - first - _EIGHT * chunk if number >= 0 else 0
            n_bytes = np.int32(2 * max(0, min(_EIGHT, left)))
            source = np.int64(0)
            if n_bytes > 0:
                source = 2 * (np.int64(number) * k + first + _EIGHT * chunk)
            ptx.copy_16(memory, _of_a(row, chunk, depth), a, source, n_bytes)
            e += np.uint32(THREADS)
        ptx.commit_copies()

    return gather


@cache
def _multiplier(tile: GroupedTile, down: int, across: int) -> Any:
    """multiply(sums, memory, row, column): `down` tiles of 16 rows and `across` of 16 columns."""
    depth, w_at, is_forward = tile.depth, tile.w_at, tile.is_forward

    @device
    def near(memory, column, k, lane):
        row = column + (lane & 7) + ((lane >> 4) << 3)
        return ptx.load_matrices(memory, w_at + _of_w(row, 2 * k + ((lane >> 3) & 1)))

    @device
    def far(memory, column, k, lane):
        place = w_at + _of_w(16 * k + (lane & 15), (column >> 3) + (lane >> 4))
        return ptx.load_matrices_transposed(memory, place)

    read = near if is_forward else far

    @device
    def add(sums, i, a, b0, b1):
        c = sums[i, 0], sums[i, 1], sums[i, 2], sums[i, 3]
        sums[i, 0], sums[i, 1], sums[i, 2], sums[i, 3] = ptx.multiply_tile(c, a, b0, b1)

    @device
    def multiply(sums, memory, row, column):
        lane = cuda.threadIdx.x & 31
        for k in range(depth // 16):
            for i in range(down):
                place = _of_a(row + 16 * i + (lane & 15), 2 * k + (lane >> 4), depth)
                a = ptx.load_matrices(memory, place)
                for j in range(across):
                    b = read(memory, column + 16 * j, k, lane)
                    add(sums, 2 * (i * across + j), a, b[0], b[1])
                    add(sums, 2 * (i * across + j) + 1, a, b[2], b[3])

    return multiply


@cache
def _writer(tile: GroupedTile, down: int, across: int) -> Any:
    numbers_at = tile.numbers_at // 4

    @device
    def write(c, sums, numbers, row, column, first, width):
        lane = cuda.threadIdx.x & 31
        for i in range(2 * down * across):
            for e in range(4):
                of_tile = row + i // (2 * across) * 16 + (lane >> 2) + 8 * (e >> 1)
                to = first + column + i % (2 * across) * 8 + ((lane & 3) << 1) + (e & 1)
                number = numbers[numbers_at + of_tile]
                if number >= 0 and to < width:
                    c[np.int64(number) * width + to] = sums[i, e]

    return write


@cache
def _kernel(name: str, tile: GroupedTile) -> Any:
    warps_down, n_rows, depth, columns = tile.warps_down, tile.rows, tile.depth, tile.columns
    high, wide = n_rows // warps_down, columns * warps_down // _WARPS
    down, across = high // 16, wide // 16
    copy, unpack, gather = _copier(name, tile), _unpacker(name, tile), _gatherer(tile)
    multiply, write = _multiplier(tile, down, across), _writer(tile, down, across)
    n_sums, take_rows, is_forward = 2 * down * across, _row_taker(tile), tile.is_forward
    block, block_bytes = DTYPES[name].block, DTYPES[name].block_bytes

    @device
    def part(of_w, row_bytes, to, at, n, k):
        """(byte where a step's weights begin, rows, weights of a row) from column `to` of C and
        number `at` of its sums on."""
        if is_forward:
            return of_w + to * row_bytes + at // block * block_bytes, n - to, k - at
        return of_w + at * row_bytes + to // block * block_bytes, n - at, k - to

    def product(c, a, w, places, starts, n, k, rows_of_a):
        memory = cuda.shared.array(0, np.uint8)
        numbers = cuda.shared.array(0, np.int32)
        sums = cuda.local.array((n_sums, 4), np.float32)
        warp, expert = cuda.threadIdx.x >> 5, np.int64(cuda.blockIdx.y)
        row, column = warp % warps_down * high, warp // warps_down * wide
        to, start = np.int64(cuda.blockIdx.x) * columns, np.int64(starts[expert])
        row_bytes = k // block * block_bytes
        of_w, count, length, width = expert * n * row_bytes, starts[expert + 1] - start, k, n
        if not is_forward:
            length, width = n, k
        for first in range(0, count, n_rows):
            for i in range(n_sums):
                for e in range(4):
                    sums[i, e] = _ZERO
            take_rows(numbers, places, start + first, count - first, rows_of_a)
            begin, n_left, k_left = part(of_w, row_bytes, to, 0, n, k)
            copy(memory, 0, w, begin, row_bytes, n_left, k_left)
            cuda.syncthreads()
            place = 0
            for at in range(0, length, depth):
                gather(memory, numbers, a, at, length)
                begin, n_left, k_left = part(of_w, row_bytes, to, at, n, k)
                ahead, n_ahead, k_ahead = part(of_w, row_bytes, to, at + depth, n, k)
                copy(memory, 1 - place, w, ahead, row_bytes, n_ahead, k_ahead)
                ptx.await_all_but_two()
                cuda.syncthreads()
                unpack(memory, place, begin, row_bytes, n_left, k_left)
                ptx.await_all_but_one()
                cuda.syncthreads()
                multiply(sums, memory, row, column)
                cuda.syncthreads()
                place = 1 - place
            ptx.await_copies()
            write(c, sums, numbers, row, column, to, width)
            cuda.syncthreads()

    shared_bytes, least = tile.n_bytes(name), 2 if n_rows == 32 else 1
    return kernel(product, THREADS, shared_bytes, least_blocks=least)


def product_call(
    name: str, tile: GroupedTile, sizes: tuple[int, int, int], rows_of_a: int, stream: Any,
    c: Any, a: Any, w: Any, places: Any, starts: Any,
) -> Call:  # fmt: skip
    """The launch: C of all rows. a in bfloat16, of which `rows_of_a` rows of C take one row each;
    sizes (experts, n, k) of w, whose type has this name."""
    n_experts, n, k = sizes
    grid = -(-(n if tile.is_forward else k) // tile.columns), n_experts
    arguments = c, a, w, places, starts, n, k, rows_of_a
    run = _kernel(name, tile)
    return launch(run, grid, THREADS, stream, *arguments, shared_bytes=tile.n_bytes(name))
