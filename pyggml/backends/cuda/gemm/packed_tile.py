"""What a block does in products of up to 32 rows of A with packed weights (packed_tiles.py).

A unit of W (weights/packed.py) is 256 weights of a row, eight groups of 32. A task of a warp is
four units that follow each other, of eight rows: lane 4g + q unpacks unit q of row g to bfloat16
in its registers, group by group. So a product of 16 × 16 by 16 × 8 finds, as numbers of its sum,
four neighbours of each of four units; their order is free, as A's are read alike. All warps run
the same code, and about at the same time: where each had a group of its own, instructions came
from far, and a launch took twice as long.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.code import byte_ptx, cluster_ptx, ptx
from pyggml.backends.cuda.code.formulas import silu
from pyggml.backends.cuda.code.fours import load_four
from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.code.straight import floats, straight
from pyggml.backends.cuda.code.warp import warp_sum
from pyggml.backends.cuda.gemm import digits
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.weights.packed import (
    MOST_GROUPS,
    Loads,
    PackedUnit,
    compile_closure,
    decode_unit,
    vocabulary,
)
from pyggml.quants.layout import GROUP

ROWS, UNITS, _UNIT = 8, 4, MOST_GROUPS * GROUP  # of W and of a task; numbers of a unit
STEP = UNITS * _UNIT
UNIT_OF_A = 4 * _UNIT + 16  # bytes from a unit of two rows of A to the next, in other banks
WARP, EIGHT = 32, 8


class PackedTileShape(NamedTuple):
    """What a part of a launch is compiled for.

    unit     of W
    sixteens sixteens of rows of A
    warps    of a block
    places   of a warp: tasks whose weights lie in shared memory
    halving  1 where two blocks, a cluster, have half of each row of W, else 0
    is_gated, has_norm, vectorized   as few_rows.py has them
    """

    unit: PackedUnit
    sixteens: int
    warps: int
    places: int
    halving: int
    is_gated: bool
    has_norm: bool
    vectorized: bool

    @property
    def task_bytes(self) -> int:
        return ROWS * UNITS * self.unit.n_bytes

    @property
    def n_sums(self) -> int:
        """Of a lane and a task."""
        return 4 * self.sixteens


class TileLayout(NamedTuple):
    """Of a block's shared memory, in bytes; A comes first.

    row      from rows g and g + 8 of A to the next
    squares, grids, places, sums, received: where they begin; the last are the sums and squares
             that come from the other block of a cluster
    place    from a task's weights to the next
    """

    row: int
    squares: int
    grids: int
    places: int
    sums: int
    received: int
    place: int


class Slices(NamedTuple):
    """Steps of A, of 1,024 numbers as a task has: those that lie in shared memory at once, those of
    a cluster's first block, and all."""

    steps: int
    of_first: int
    all_steps: int


# -- a group -------------------------------------------------------------------------------------


def source_of(unit: PackedUnit, i: int) -> str:
    """The source of `add(memory, at, grids, x, apart, sums)`: the sums of group i of the unit at
    byte `at` of shared memory, 32 weights, by A's numbers at x. Of types of four bits and more the
    excess of a byte goes with the minimum, which so is known to 2⁻⁸ of a scale."""
    loads, group = Loads(unit), decode_unit(unit)[0][i]
    lines = ["def add(memory, at, grids, x, apart, sums):", *loads.opening()]
    lines += loads.lines((*group.words, *group.scales, *group.minima))
    lines += [f"    scale{n} = {scale}" for n, scale in enumerate(group.scales)]
    for n in range(2):
        least = group.minima[n % len(group.minima)] if group.minima else "ZERO"
        lines += [f"    least{n} = {least}{'' if is_exact(unit) else f' - scale{n} * EXCESS'}"]
    words, factors = ", ".join(group.words), "scale0, scale1, least0, least1"
    lines += [f"    return multiply(memory, x, apart, ({words}), ({factors}), sums)"]
    return "\n".join(lines)


def is_exact(unit: PackedUnit) -> bool:
    """Whether the excess of a byte is taken away before it is scaled: of types of fewer than four
    bits, whose weights are few scales at most."""
    return 8 * unit.n_bytes < 4 * GROUP * unit.n_groups


@cache
def multiplier(shape: PackedTileShape) -> Any:
    """multiply(memory, here, layout, step): the sums of a task, whose weights lie at `here`; lane
    4g + q has numbers 2q and 2q + 1 of rows g and g + 8 of each sixteen of A. Two sums at a time,
    as a product waits for the one before it."""
    lines = ["def multiply(memory, here, layout, step):"]
    lines += ["    g, q = (cuda.threadIdx.x & 31) >> 2, cuda.threadIdx.x & 3"]
    lines += [f"    at = here + (g * {UNITS} + q) * {shape.unit.n_bytes}"]
    lines += [f"    x = g * layout.row + (step * {UNITS} + q) * {UNIT_OF_A}"]
    lines += [f"    sums, apart = ({'ZERO, ' * 8 * shape.sixteens}), {EIGHT} * layout.row"]
    for i in range(MOST_GROUPS):
        place = f"x + {4 * GROUP * i}"
        lines += [f"    sums = add{i}(memory, at, layout.grids, {place}, apart, sums)"]
    totals = ", ".join(
        f"sums[{8 * (i // 4) + i % 4}] + sums[{8 * (i // 4) + 4 + i % 4}]"
        for i in range(shape.n_sums)
    )
    lines += [f"    return ({totals})"]
    names = {
        **vocabulary(), "ZERO": np.float32(0), "EXCESS": np.float32(byte_ptx.EXCESS),
        "multiply": byte_ptx.group_multiplier(is_exact(shape.unit), shape.sixteens),
    }  # fmt: skip
    scope = {"cuda": cuda, "ZERO": np.float32(0)}
    for i in range(MOST_GROUPS):
        group = compile_closure(source_of(shape.unit, i), "add", names)
        scope[f"add{i}"] = straight(group, floats(8 * shape.sixteens))
    return device(compile_closure("\n".join(lines), "multiply", scope))


# -- what a block reads --------------------------------------------------------------------------


@cache
def fetcher(shape: PackedTileShape) -> Any:
    piece = 16 if UNITS * shape.unit.n_bytes % 16 == 0 else 8
    copy = byte_ptx.copy_16 if piece == 16 else byte_ptx.copy_8
    unit_bytes, is_gated = shape.unit.n_bytes, shape.is_gated
    pieces = UNITS * unit_bytes // piece

    @device
    def fetch(memory, to, part, tile, step, units):
        """Begin to copy a task's weights, by a warp; of rows behind the last, that one's. Of a
        gated product, every other one is the gate's."""
        w = part[2]
        if is_gated and step & 1:
            w = part[3]
        first, unit = tile * ROWS, (step >> is_gated) * UNITS
        for e in range(cuda.threadIdx.x & 31, ROWS * pieces, WARP):
            of_row = e // pieces
            row = np.int64(min(first + of_row, part[4] - 1))
            copy(
                memory,
                to + e * piece,
                w,
                (row * units + unit) * unit_bytes + (e - of_row * pieces) * piece,
            )

    return fetch


@cache
def settler(warps: int, is_gated: bool) -> Any:
    @device
    def settle(start, tile, step, n_tiles, at_once, own_steps):
        """Where a warp's next task is, if it has gone on by its step: beyond a tile's steps are
        those of the next, beyond the last tile's those of the next slice. start: of the slice"""
        n = min(at_once, own_steps - start) << is_gated
        while step >= n and start < own_steps:
            step, tile = step - n, tile + 1
            if tile >= n_tiles:
                step, tile, start = (
                    np.int64(cuda.threadIdx.x >> 5),
                    tile - n_tiles,
                    start + at_once,
                )
                n = min(at_once, own_steps - start) << is_gated
        return start, tile, step

    return settle


@cache
def a_reader(shape: PackedTileShape) -> Any:
    """read(memory, floats, a, k, m, first, steps, adds, norm, layout): numbers first … of A's rows
    to shared memory, rows behind the last as that one. With a norm: times its weights, and the sums
    of squares. Rows g and g + 8 of a sixteen lie together, as a product wants them: numbers 4i and
    4i + 1 of both, then 4i + 2 and 4i + 3."""
    n_pairs, fours = EIGHT * shape.sixteens, [(i, e) for i in range(UNITS) for e in (0, 4)]
    lines = ["def read(memory, floats, a, k, m, first, steps, adds, norm, layout):"]
    lines += ["    lane, pair = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5"]
    lines += [f"    while pair < {n_pairs}:"]
    lines += ["        row, p, q = pair + (pair & 8), ZERO, ZERO"]
    lines += ["        of, to = first + 8 * lane, pair * layout.row + 32 * lane"]
    lines += ["        at, up = min(row, m - 1) * k + of, min(row + 8, m - 1) * k + of"]
    lines += ["        for _ in range(steps):"]
    for name, place in (("x", "at"), ("y", "up")):
        lines += [
            f"            {name}{i}{e} = load(a, {place} + {_UNIT * i + e})" for i, e in fours
        ]
    if shape.has_norm:
        lines += [f"            w{i}{e} = load(norm[0], of + {_UNIT * i + e})" for i, e in fours]
        for i, e in fours:
            lines += [f"            p, q = p + squares(x{i}{e}), q + squares(y{i}{e})"]
            for name in "xy":
                lines += [f"            {name}{i}{e} = times({name}{i}{e}, w{i}{e})"]
    for i, e in fours:
        both = ((name, n) for n in (0, 2) for name in "xy")
        words = [f"two_bf16({z}{i}{e}[{n}], {z}{i}{e}[{n + 1}])" for z, n in both]
        place = f"to + {UNIT_OF_A * i + 4 * e}"
        lines += [f"            put_shared_words(memory, {place}, {', '.join(words)})"]
    lines += [f"            at, up, of = at + {STEP}, up + {STEP}, of + {STEP}"]
    lines += [f"            to += {UNITS * UNIT_OF_A}"]
    lines += ["        keep(floats, (layout.squares >> 2) + row, lane, p, q, adds)"]
    lines += [f"        pair += {shape.warps}"]
    scope = {
        "cuda": cuda, "np": np, "ZERO": np.float32(0), "two_bf16": ptx.two_bf16,
        "load": load_four if shape.vectorized else digits.one_by_one,
        "put_shared_words": byte_ptx.put_shared_words,
        "squares": digits.squares, "times": digits.times,
        "keep": _keep_squares if shape.has_norm else nothing,
    }  # fmt: skip
    return device(compile_closure("\n".join(lines), "read", scope))


@device
def _keep_squares(floats, at, lane, p, q, adds):
    """The sums over a warp for rows g and g + 8, beside what is there already if it `adds`."""
    p, q = warp_sum(p), warp_sum(q)
    if lane == 0:
        here, there = np.uint64(at), np.uint64(at + 8)
        floats[here] = p + (floats[here] if adds else np.float32(0))
        floats[there] = q + (floats[there] if adds else np.float32(0))


@device
def nothing(*_):
    pass


# -- what a block writes -------------------------------------------------------------------------


@cache
def putter(shape: PackedTileShape) -> Any:
    """put(floats, at, sums): a lane's sums; those of a warp lie side by side."""
    lines = ["def put(floats, at, sums):"]
    for i in range(shape.n_sums):
        lines += [f"    floats[np.uint64(at + {WARP * i})] = sums[{i}]"]
    return device(compile_closure("\n".join(lines), "put", {"np": np}))


@device
def _rate(floats, row, k, layout, norm):
    """What multiplies the results of row `row` of A: 1 over the root of its mean square."""
    mean = floats[np.uint64((layout.squares >> 2) + row)] * ptx.reciprocal(np.float32(k))
    return ptx.inverse_root(mean + norm[1])


@device
def _total(floats, at, n, apart):
    total = np.float32(0)
    for i in range(n):
        total += floats[np.uint64(at + i * apart)]
    return total


@cache
def beginner(shape: PackedTileShape) -> Any:
    n_matrices, has_norm, halving = 1 << shape.is_gated, shape.has_norm, shape.halving

    @device
    def begin(barrier, half, n, m):
        """Expect what the other block of a cluster sends of n results of m rows."""
        if halving:
            if cuda.threadIdx.x == 0:
                numbers = n_matrices * (n + 1 - half >> 1) + (m if has_norm else 0)
                cluster_ptx.expect_bytes(barrier, np.uint32(4 * numbers))
            cluster_ptx.arrive_in_cluster()

    return begin


@cache
def sender(shape: PackedTileShape) -> Any:
    """exchange(memory, floats, barrier, layout, half, n_rows, m, n_steps): the blocks of a cluster
    send each other the sums of the results that the other writes, and the squares of A."""
    of_task, is_gated, has_norm = shape.n_sums * WARP, shape.is_gated, shape.has_norm

    @device
    def exchange(memory, floats, barrier, layout, half, n_rows, m, n_steps):
        n, there = n_rows * m, np.uint32(1 - half)
        middle, at = n + 1 >> 1, layout.sums >> 2
        first, last = (0, middle) if half else (middle, n)
        apart, to = of_task << is_gated, layout.received
        cluster_ptx.await_cluster()  # until then the other may not have begun
        for i in range(first + cuda.threadIdx.x, last, cuda.blockDim.x):
            own, place = at + place_of(i, n_rows, n_steps * apart), to + (i - first << 2 + is_gated)
            cluster_ptx.send(memory, place, barrier, there, _total(floats, own, n_steps, apart))
            if is_gated:
                total = _total(floats, own + of_task, n_steps, apart)
                cluster_ptx.send(memory, place + 4, barrier, there, total)
        to += middle << 2 + is_gated
        if has_norm:
            for row in range(cuda.threadIdx.x, m, cuda.blockDim.x):
                square = floats[np.uint64((layout.squares >> 2) + row)]
                cluster_ptx.send(memory, to + 4 * row, barrier, there, square)
        cluster_ptx.await_bytes(barrier)
        cuda.syncthreads()
        if has_norm:
            for row in range(cuda.threadIdx.x, m, cuda.blockDim.x):
                square = floats[np.uint64((to >> 2) + row)]
                floats[np.uint64((layout.squares >> 2) + row)] += square
            cuda.syncthreads()

    return exchange


@device
def place_of(i, n_rows, of_tile):
    """Where the first sum of result i lies among those of a block, of_tile numbers a tile."""
    of_a = i // n_rows
    row = i - of_a * n_rows
    at = ((of_a >> 4) * 4 + ((of_a >> 2) & 2) + (row & 1)) * WARP
    return at + ((of_a & 7) << 2) + ((row & 7) >> 1) + (row >> 3) * of_tile


@cache
def finisher(shape: PackedTileShape) -> Any:
    of_task, is_gated, has_norm = shape.n_sums * WARP, shape.is_gated, shape.has_norm
    halving, exchange = shape.halving, sender(shape)

    @device
    def finish(memory, floats, barrier, part, first, n_rows, half, k, m, layout, norm, n_steps):
        """Add up the sums of all steps, and write rows first … of the part's results: of a cluster
        each block half of them."""
        apart, at, n = of_task << is_gated, layout.sums >> 2, n_rows * m
        begin, end = 0, n
        if halving:
            exchange(memory, floats, barrier, layout, half, n_rows, m, n_steps)
            begin, end = (n + 1 >> 1, n) if half else (0, n + 1 >> 1)
        for i in range(begin + cuda.threadIdx.x, end, cuda.blockDim.x):
            of_a = i // n_rows
            row = i - of_a * n_rows
            if first + row < part[4]:
                own = at + place_of(i, n_rows, n_steps * apart)
                come = (layout.received >> 2) + (i - begin << is_gated)
                rate = _rate(floats, of_a, k, layout, norm) if has_norm else np.float32(1)
                total = _total(floats, own, n_steps, apart)
                total = rate * (total + floats[np.uint64(come)] if halving else total)
                place = np.uint64(of_a * part[4] + first + row)
                if is_gated:
                    up = _total(floats, own + of_task, n_steps, apart)
                    up += floats[np.uint64(come + 1)] if halving else np.float32(0)
                    total = silu(total) * (rate * up)
                elif part[6]:
                    total += part[1][place]
                part[0][place] = total

    return finish


@cache
def keeper(shape: PackedTileShape) -> Any:
    has_norm, halving = shape.has_norm, shape.halving

    @device
    def keep(floats, a, k, m, layout, norm):
        """Write the normalised A, if others read it; by the first blocks."""
        if has_norm and norm[3] and cuda.blockIdx.x <= halving:
            for row in range(cuda.blockIdx.x, m, 1 + halving):
                rate = _rate(floats, row, k, layout, norm)
                for i in range(cuda.threadIdx.x, k, cuda.blockDim.x):
                    at = np.uint64(row * k + i)
                    norm[2][at] = a[at] * rate * norm[0][np.uint64(i)]

    return keep
