"""Few rows of A, as in generation: dot products of packed weights and of A in digits (digits.py).

A warp takes one or two rows of W. Their bytes come to shared memory by copies of 16 bytes, a piece
of 2048 weights (of blocks of 32: 1024) ahead of the one that is multiplied; the first is under way
before A is there. Four lanes share a block: each takes 8 weights of every group of 32, as words of
four bytes (pyggml.backends.cuda.packed).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda import byte_ptx, ptx
from pyggml.backends.cuda.driver import cuda, device
from pyggml.backends.cuda.early import waiting
from pyggml.backends.cuda.formulas import ZERO, silu
from pyggml.backends.cuda.gemm import digits
from pyggml.backends.cuda.packed import Group, closed, groups_of, unpacker_of
from pyggml.backends.cuda.warp import ALL
from pyggml.dtypes import DTYPES
from pyggml.quants.layout import GROUP

QUADS = 8  # of a warp: four lanes that share a block
PIECES = {GROUP: 4}  # blocks of a quad in a piece, by the weights of a block; of others one


class Kind(NamedTuple):
    """What a product is compiled for.

    name      the type of W
    columns   sums of a lane for each row of A: rows of W, or a gate and what it lets through
    rows      rows of A
    is_gated  the result is silu(A · gateᵀ) · (A · upᵀ)
    """

    name: str
    columns: int
    rows: int
    is_gated: bool


class Cut(NamedTuple):
    """How a product is cut.

    quads   groups of four lanes that share a row of W
    piece   blocks that are copied at once
    stage   bytes of a row's piece in shared memory
    """

    quads: int
    piece: int
    stage: int


# -- a block ------------------------------------------------------------------------------------


@device
def _dot(w, high, low):
    """Four weights times four numbers."""
    above = byte_ptx.dot_bytes(w, high, np.int32(0)) << np.int32(8)
    return np.float32(byte_ptx.dot_bytes(w, low, above))


@device
def _two_dots(w, high, low, other, other_high, other_low):
    """The same of eight."""
    above = byte_ptx.dot_bytes(other, other_high, byte_ptx.dot_bytes(w, high, np.int32(0)))
    below = byte_ptx.dot_bytes(w, low, above << np.int32(8))
    return np.float32(byte_ptx.dot_bytes(other, other_low, below))


def source_of(groups: Sequence[Group], columns: int, rows: int) -> str:
    """The source of `add_block`: a lane's sums, with its weights of a block of each column.

    The sums come column by column, of each for all rows of A.
    """
    sums = [[f"sum{c}_{t}" for t in range(rows)] for c in range(columns)]
    flat = "".join(f"{name}, " for names in sums for name in names)
    lines = ["def add_block(memory, places, q, x, factors, x_step, f_step, sums):"]
    lines += [f"    {flat}= sums"]
    lines += [f"    weights{c} = unpack(memory, places[{c}], q)" for c in range(columns)]
    for i, group in enumerate(groups):
        for t in range(rows):
            x_at = f"x + {digits.GROUP_BYTES * i} + {t} * x_step"
            f_at = f"factors + {digits.FACTOR_BYTES * i} + {t} * f_step"
            lines += [
                f"    high, low, high_too, low_too = shared_words(memory, {x_at})",
                f"    step, total = shared_pair(memory, {f_at})",
                "    step, total = as_float(step), as_float(total)",
            ]
            for c in range(columns):
                lines += [f"    {sums[c][t]} += {_term(group, f'weights{c}[{i}]')}"]
    return "\n".join([*lines, f"    return ({flat})"])


def _term(group: Group, of: str) -> str:
    """A group's part of a sum; `of` is (word, word, scale, scale, minimum)."""
    if group.scales[0] == group.scales[1]:
        text = f"step * {of}[2] * two_dots({of}[0], high, low, {of}[1], high_too, low_too)"
    else:
        first, second = f"dot({of}[0], high, low)", f"dot({of}[1], high_too, low_too)"
        text = f"step * ({of}[2] * {first} + {of}[3] * {second})"
    return f"{text} + total * {of}[4]" if group.minimum else text


def _adder(name: str, columns: int, rows: int) -> Any:
    known = {
        "unpack": unpacker_of(name), "shared_words": byte_ptx.shared_words, "dot": _dot,
        "shared_pair": byte_ptx.shared_pair, "as_float": ptx.as_float, "two_dots": _two_dots,
    }  # fmt: skip
    return device(closed(source_of(groups_of(name), columns, rows), "add_block", known))


# -- a piece ------------------------------------------------------------------------------------


@device
def _fetch(memory, to, w, start, n):
    """Begin to copy n bytes of w from byte `start` on, and those before that make it a multiple of
    16; by the lanes of a warp."""
    first = start & ~np.int64(15)
    for at in range(16 * (cuda.threadIdx.x & 31), n + start - first, 512):
        left = np.int32(min(np.int64(16), w.size - first - at))
        ptx.copy_16(memory, to + at, w, first + at, left)


@device
def _width_sum(x, width):
    """The sum over `width` lanes."""
    step = width >> 1
    while step > 0:
        x += cuda.shfl_xor_sync(ALL, x, step)
        step >>= 1
    return x


@device
def _one_place(at, stage, start, row_bytes):
    return (at + (start & 15),)


@device
def _two_places(at, stage, start, row_bytes):
    return at + (start & 15), at + stage + ((start + row_bytes) & 15)


@device
def _moved_one(places, n):
    return (places[0] + n,)


@device
def _moved_two(places, n):
    return places[0] + n, places[1] + n


def _fetcher(kind: Kind) -> Any:
    is_gated, block_bytes = kind.is_gated, DTYPES[kind.name].block_bytes

    @device
    def fetch(memory, to, part, n_blocks, n_rows, row, first):
        """Begin to copy a piece of so many rows, from their block `first` on."""
        cut = part[5]
        n_bytes = min(cut.piece, n_blocks - first) * block_bytes
        for r in range(n_rows):
            start = (min(row + r, part[4] - 1) * n_blocks + first) * block_bytes
            if is_gated:
                _fetch(memory, to + 2 * r * cut.stage, part[2], start, n_bytes)
                _fetch(memory, to + (2 * r + 1) * cut.stage, part[3], start, n_bytes)
            else:
                _fetch(memory, to + r * cut.stage, part[2], start, n_bytes)

    return fetch


def _piece_adder(kind: Kind) -> Any:
    add_block, rows = _adder(kind.name, kind.columns, kind.rows), kind.rows
    places_of, moved = (_one_place, _moved_one) if kind.columns == 1 else (_two_places, _moved_two)
    block, block_bytes = DTYPES[kind.name].block, DTYPES[kind.name].block_bytes
    n_groups, at_once, is_gated = block // GROUP, PIECES.get(block, 1), kind.is_gated

    @device
    def add_piece(memory, at, part, row, n_blocks, first, room, lane, sums):
        """A lane's sums, with its blocks of a piece, whose bytes begin at `at`, of its rows."""
        cut, quad, q = part[5], lane % (4 * part[5].quads) >> 2, lane & 3
        start = (min(row, part[4] - 1) * n_blocks + first) * block_bytes
        row_bytes = 0 if is_gated or row + 1 >= part[4] else n_blocks * block_bytes
        places = places_of(at, cut.stage, start, row_bytes)
        for i in range(at_once):
            mine = quad + i * cut.quads
            if mine < min(cut.piece, n_blocks - first):
                group = (first + mine) * n_groups
                group += group >> 3  # so many groups' room lies before
                x = group * digits.GROUP_BYTES + 16 * q
                factors = rows * room.digits + group * digits.FACTOR_BYTES
                here = moved(places, mine * block_bytes)
                sums = add_block(memory, here, q, x, factors, room.digits, room.factors, sums)
        return sums

    return add_piece


def _finisher(kind: Kind) -> Any:
    rows, is_gated = kind.rows, kind.is_gated
    n_sums = rows if is_gated else kind.columns * rows

    @device
    def finish(part, row, lane, sums):
        """Write the sums of all lanes of a row."""
        width = 4 * part[5].quads
        for i in range(n_sums):
            total = _width_sum(sums[i], width)
            passed = _width_sum(sums[rows + i], width) if is_gated else ZERO
            column = row + i // rows
            if lane % width == 0 and column < part[4]:
                at = i % rows * part[4] + column
                if is_gated:
                    part[0][at] = silu(total) * passed
                elif part[6]:
                    part[0][at] = part[1][at] + total
                else:
                    part[0][at] = total

    return finish


# -- a part -------------------------------------------------------------------------------------


def _multiplier(kind: Kind) -> Any:
    fetch, add_piece, finish = _fetcher(kind), _piece_adder(kind), _finisher(kind)
    columns, zeros = kind.columns, (ZERO,) * (kind.columns * kind.rows)

    @device
    def multiply(memory, here, half, part, n_blocks, n_rows, row, apart, room):
        """A warp's rows, from `row` on, of which the first piece is on its way to `here`."""
        cut, n, lane = part[5], part[4], cuda.threadIdx.x & 31
        width, there = 4 * cut.quads, here + half
        mine = lane // width  # of the rows, or pairs of them, that a warp has at once
        of_lane = n_rows * width // 32
        sums, first = zeros, 0
        while row < n:
            is_last = first + cut.piece >= n_blocks
            next_row, next_first = (row + apart, 0) if is_last else (row, first + cut.piece)
            if next_row < n:
                fetch(memory, there, part, n_blocks, n_rows, next_row, next_first)
            ptx.commit_copies()
            ptx.await_all_but_one()
            cuda.syncwarp()
            at, own = here + mine * columns * cut.stage, row + mine * of_lane
            sums = add_piece(memory, at, part, own, n_blocks, first, room, lane, sums)
            if is_last:
                finish(part, own, lane, sums)
                sums = zeros
            cuda.syncwarp()  # before the next copies
            row, first, here, there = next_row, next_first, there, here

    return multiply


@cache
def product_of(kind: Kind, has_norm: bool) -> Any:
    """product(memory, parts, part, a, k, room, norm, number, n_numbers): block `number`'s share.

    part  (out, added, w, up, n, cut, adds): the result; what is added to it, if `adds`; W, and the
          other matrix of a gated product; rows of W; the Cut
    room  digits.Room of a row of A; parts, norm: as digits.rounder has them
    """
    rows, columns, block = kind.rows, kind.columns, DTYPES[kind.name].block
    of_lane = 1 if kind.is_gated else columns  # rows of a matrix
    fetch, multiply, round_a = _fetcher(kind), _multiplier(kind), digits.rounder(rows, has_norm)
    await_others, release_others = waiting()

    @device
    def product(memory, parts, part, a, k, room, norm, number, n_numbers):
        cut, warp, n_warps = part[5], cuda.threadIdx.x >> 5, cuda.blockDim.x >> 5
        n_blocks, at_once = k // block, 8 // cut.quads
        n_rows = at_once * of_lane
        row, apart = (number * n_warps + warp) * n_rows, n_numbers * n_warps * n_rows
        half = at_once * columns * cut.stage  # one is multiplied, the other is filled
        here = rows * (room.digits + room.factors) + 2 * warp * half
        if row < part[4]:
            fetch(memory, here, part, n_blocks, n_rows, row, 0)
        ptx.commit_copies()
        await_others()
        release_others()
        round_a(memory, parts, a, k, room, norm)
        cuda.syncthreads()
        multiply(memory, here, half, part, n_blocks, n_rows, row, apart, room)

    return product
