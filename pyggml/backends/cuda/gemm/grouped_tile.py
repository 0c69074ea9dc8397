"""What a block does with a tile of products with one weight per expert (grouped.py).

Packed weights, 256 of each row of w, are copied to shared memory ahead, and unpacked there
to bfloat16 while A's rows are gathered. Chunks of 8 numbers are exchanged by their row's number, so
that eight rows of a column lie in different banks. All is bound by its instructions: what a thread
needs in each step is found before the first.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.code import byte_ptx, ptx
from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.weights.readers import eights_of, weight_of
from pyggml.graph.dtypes import DTYPES
from pyggml.quants.layout import GROUP
from pyggml.sizes import round_up

THREADS = 256
ACROSS = 256  # weights of a row of w that are unpacked at once
_EIGHT = 8  # numbers of a chunk of 16 bytes


class GroupedTile(NamedTuple):
    """What a block multiplies at once.

    rows         of A
    of_w         rows of w
    is_forward   whether the sum runs along w's rows of numbers, else down them
    warps_down   warps that share the columns of C; the others share its rows
    places       for packed weights: those of the next step come to the second meanwhile, or to the
                 only one when these are unpacked
    """

    rows: int
    of_w: int
    is_forward: bool
    warps_down: int
    places: int = 2

    @property
    def depth(self) -> int:
        """Numbers of a sum."""
        return ACROSS if self.is_forward else self.of_w

    @property
    def columns(self) -> int:
        """Columns of C."""
        return self.of_w if self.is_forward else ACROSS

    @property
    def rows_of_thread(self) -> int:
        """Rows of A of which a thread gathers a chunk."""
        return self.rows * self.depth // _EIGHT // THREADS

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
        """Where the packed weights begin, of as many steps as there are places."""
        return self.numbers_at + 4 * self.rows

    def n_bytes(self, name: str) -> int:
        """Of shared memory, for weights of this type."""
        return self.packed_at + self.places * self.of_w * _packed_row(name)


def _at_once(name: str) -> int:
    """Weights of a row that are unpacked together."""
    return max(DTYPES[name].block, _EIGHT)


def _packed_row(name: str) -> int:
    """Bytes of 256 packed weights in shared memory: they may begin in the middle of 16."""
    return round_up(DTYPES[name].row_bytes(ACROSS), 16) + 16


@cache
def copier(name: str, tile: GroupedTile) -> Any:
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
def unpacker(name: str, tile: GroupedTile) -> Any:
    """unpack(memory, place, start, row_bytes, n_rows, n_left): what `copy` brought, from byte
    `start` on; zeros where it brought nothing. A thread takes the same columns of some rows."""
    at_once, row_size, w_at = _at_once(name), _packed_row(name), tile.w_at
    pieces, per_row = min(at_once, GROUP) // _EIGHT, ACROSS // at_once
    step = at_once // DTYPES[name].block * DTYPES[name].block_bytes
    of_w, packed_at, together = tile.of_w, tile.packed_at, THREADS // (per_row * pieces)
    eights = (eights_of if DTYPES[name].block > 1 else _eights_of_plain)(name, _put)

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
                    _put(to, group, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO)

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
def row_taker(tile: GroupedTile) -> Any:
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
def gatherer(tile: GroupedTile) -> tuple[Any, Any]:
    """(find, gather): a thread copies the same chunk of some rows of A.

    find(rows, numbers, k, rows_of_a)     rows: where the thread's rows of A (…, k) begin, -1: none
    gather(memory, rows, a, first, k)     numbers first … of them in bfloat16; zeros outside
    """
    depth, chunks, numbers_at = tile.depth, tile.depth // _EIGHT, tile.numbers_at // 4
    together, n = THREADS // chunks, tile.rows_of_thread

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
            n_read = n_bytes if rows[i] >= 0 else np.int32(0)  # then the address does not matter
            ptx.copy_16(memory, to + i * together * 2 * depth, a, 2 * (rows[i] + at), n_read)
        ptx.commit_copies()

    return find, gather


@device
def _turns(turned):
    return turned << 4, (turned ^ 2) << 4, (turned ^ 4) << 4, (turned ^ 6) << 4


@device
def _add_two(sums, i, a, b):
    """Sums of 16 rows and 16 columns."""
    ptx.add_tile(sums, 2 * i, a, b[0], b[1])
    ptx.add_tile(sums, 2 * i + 1, a, b[2], b[3])


def multiplier(tile: GroupedTile, down: int, across: int) -> Any:
    """multiply(sums, memory, row, column): `down` tiles of 16 rows and `across` of 16 columns.

    Chunk c of row r lies at ((c ^ (r & 7)) << 4) of its row. A lane's rows are alike in r & 7, so
    its chunks 2i + h, i from 0 to 3, lie at the four `turns` of (h ^ (r & 7)), and those eight
    chunks on 128 bytes on.
    """
    return (_along_rows if tile.is_forward else _down_rows)(tile, down, across)


@cache
def _along_rows(tile: GroupedTile, down: int, across: int) -> Any:
    """Rows of w are columns of C."""
    depth, w_at = tile.depth, tile.w_at
    of_a, of_w = 2 * depth, 2 * ACROSS  # bytes of a row

    @device
    def step(sums, memory, at, b_at):
        """Sixteen numbers of the sum."""
        for i in range(down):
            a = ptx.load_matrices(memory, at + 16 * of_a * i)
            for j in range(across):
                _add_two(sums, i * across + j, a, ptx.load_matrices(memory, b_at + 16 * of_w * j))

    @device
    def multiply(sums, memory, row, column):
        lane = cuda.threadIdx.x & 31
        a_at = (row + (lane & 15)) * of_a
        b_at = w_at + (column + (lane & 7) + ((lane >> 4) << 3)) * of_w
        a, b = _turns((lane >> 4) ^ (lane & 7)), _turns(((lane >> 3) & 1) ^ (lane & 7))
        for _ in range(depth // 64):
            step(sums, memory, a_at + a[0], b_at + b[0])
            step(sums, memory, a_at + a[1], b_at + b[1])
            step(sums, memory, a_at + a[2], b_at + b[2])
            step(sums, memory, a_at + a[3], b_at + b[3])
            a_at, b_at = a_at + 128, b_at + 128

    return multiply


@cache
def _down_rows(tile: GroupedTile, down: int, across: int) -> Any:
    """Rows of w are numbers of the sum."""
    depth, w_at = tile.depth, tile.w_at
    assert depth % 64 == across % 4 == 0, f"{tile} has parts of turns"
    of_a, of_w = 2 * depth, 2 * ACROSS  # bytes of a row

    @device
    def step(sums, memory, at, b_at, b):
        """Sixteen numbers of the sum."""
        for i in range(down):
            a = ptx.load_matrices(memory, at + 16 * of_a * i)
            for j in range(across // 4):
                for_j, n = b_at + 128 * j, i * across + 4 * j
                _add_two(sums, n, a, ptx.load_matrices_transposed(memory, for_j + b[0]))
                _add_two(sums, n + 1, a, ptx.load_matrices_transposed(memory, for_j + b[1]))
                _add_two(sums, n + 2, a, ptx.load_matrices_transposed(memory, for_j + b[2]))
                _add_two(sums, n + 3, a, ptx.load_matrices_transposed(memory, for_j + b[3]))

    @device
    def multiply(sums, memory, row, column):
        lane = cuda.threadIdx.x & 31
        at = (row + (lane & 15)) * of_a
        b_at = w_at + (lane & 15) * of_w + 2 * column
        turned = _turns((lane >> 4) ^ (lane & 7))
        for _ in range(depth // 64):
            step(sums, memory, at + turned[0], b_at, turned)
            step(sums, memory, at + turned[1], b_at + 16 * of_w, turned)
            step(sums, memory, at + turned[2], b_at + 32 * of_w, turned)
            step(sums, memory, at + turned[3], b_at + 48 * of_w, turned)
            at, b_at = at + 128, b_at + 64 * of_w

    return multiply


@cache
def writer(tile: GroupedTile, down: int, across: int, rounds: bool) -> Any:
    """write(c, sums, numbers, row, column, width); rounds: whether c is in bfloat16."""
    numbers_at, put = tile.numbers_at // 4, ptx.put_two(rounds)

    @device
    def write(c, sums, numbers, row, column, width):
        """column: of C, of the warp's first; a lane has two neighbours of each eight from there."""
        lane = cuda.threadIdx.x & 31
        column += (lane & 3) << 1
        for i in range(2 * down):
            number = numbers[numbers_at + row + 8 * i + (lane >> 2)]
            if number >= 0:
                at = np.int64(number) * width + column
                for j in range(2 * across):
                    if column + 8 * j < width:
                        of, e = i // 2 * 2 * across + j, 2 * (i & 1)
                        put(c, at + 8 * j, sums[of, e], sums[of, e + 1])

    return write
