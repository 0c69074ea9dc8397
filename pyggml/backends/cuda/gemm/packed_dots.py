"""Few rows of A, as in generation: dot products of packed weights and of A in digits (digits.py).

A lane multiplies a unit of W (packed.py), at most 256 weights of a row, at offsets that are known
when the kernel is compiled. A warp takes 32 units that follow each other, a chunk: it lies in one
piece whatever the type and the length of a row. Copies of 16 bytes bring it to shared memory; those
of a warp's first chunks are under way before A is there. A block has whole rows; it adds up their
units when all are multiplied.

Such a kernel runs for a few µs, and its instructions must come from far: the fewer they are, the
faster it is. So arrays are read at unsigned places or by instructions of our own, since of a signed
place Numba asks whether it counts from the end. No whole number is divided by one that is not known
when the kernel is compiled.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.code import byte_ptx, ptx
from pyggml.backends.cuda.code.formulas import ZERO, silu
from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.code.straight import floats, straight
from pyggml.backends.cuda.gemm import digits
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.weights.packed import (
    Loads,
    PackedUnit,
    compile_closure,
    decode_unit,
    grid_words_of,
    vocabulary,
)

CHUNK = 32  # units


class DotShape(NamedTuple):
    """What a product is compiled for.

    unit        of W
    units       of a row of W
    rows        rows of A
    is_gated    the result is silu(A · gateᵀ) · (A · upᵀ)
    vectorized  whether A, and the weights of a norm, lie as load_four wants them
    is_whole    whether W ends with a whole chunk
    has_halves  whether A's factors have the sums of halves of groups; alike in all of a launch
    over_a      whether the sums of units lie where the digits of A's only row were: a warp keeps
                those of its chunks, two at most, until all are multiplied
    """

    unit: PackedUnit
    units: int
    rows: int
    is_gated: bool
    vectorized: bool
    is_whole: bool
    has_halves: bool
    over_a: bool = False


class Cut(NamedTuple):
    """How the rows of W are shared out. A slab is the fewest rows that end with a chunk.

    slab    rows of a slab
    slabs   of a block
    more    blocks that have one more
    most    units that a block has at most
    """

    slab: int
    slabs: int
    more: int
    most: int


class SharedLayout(NamedTuple):
    """The shared memory of a block, in bytes.

    a       of A's rows, at its beginning
    grids   where the grids of W's type begin, if it has some
    sums    where the sums of units begin
    chunks  where the chunks of W begin, the first of each warp
    chunk   from a warp's chunk to the next warp's
    second  from a warp's first chunk to its second; 0 if it has one only
    """

    a: digits.DigitLayout
    grids: int
    sums: int
    chunks: int
    chunk: int
    second: int


# -- a unit --------------------------------------------------------------------------------------


def source_of(unit: PackedUnit, rows: int, has_halves: bool) -> str:
    """The source of `multiply_unit`: the dot products of the unit at byte `at` of shared memory and
    of all rows of A, whose digits begin at x and whose factors begin at f; grids: of W's type."""
    loads, totals = Loads(unit), [f"total{t}" for t in range(rows)]
    lines = ["def multiply_unit(memory, at, grids, x, f, x_step, f_step):", *loads.opening()]
    lines += [f"    {total} = ZERO" for total in totals]
    for i, group in enumerate(decode_unit(unit)[0]):
        both = group.scales[0] == group.scales[1]
        scales = group.scales[:1] if both else group.scales
        lines += loads.lines((*group.words, *scales, *group.minima))
        lines += [f"    a{n} = {word}" for n, word in enumerate(group.words)]
        lines += [f"    scale{n} = {scale}" for n, scale in enumerate(scales)]
        lines += [f"    minimum{n} = {minimum}" for n, minimum in enumerate(group.minima)]
        for t, total in enumerate(totals):
            of_row = _of_row(i, t, len(scales), len(group.minima), has_halves)
            lines += [f"    {line}" for line in of_row]
            lines += [f"    {total} += product"]
    return "\n".join([*lines, f"    return ({''.join(f'{total}, ' for total in totals)})"])


def _of_row(i: int, t: int, n_scales: int, n_minima: int, has_halves: bool) -> list[str]:
    """The lines that find group i's part of the product with row t."""
    at = f"x + {t} * x_step + {digits.GROUP_BYTES * i}"
    lines = [f"h{q}, l{q}, h{q + 4}, l{q + 4} = shared_words(memory, {at} + {16 * q})"
             for q in range(4)]  # fmt: skip
    factor_at = f"f + {t} * f_step + {digits.factor_bytes(has_halves) * i}"
    if n_minima == 2:
        lines += [f"step, sum_of_a, sum0, sum1 = shared_words(memory, {factor_at})"]
    else:
        lines += [f"step, sum_of_a = shared_pair(memory, {factor_at})"]
    halves = [range(8)] if n_scales == 1 else [range(4), range(4, 8)]
    terms = [f"scale{n} * {_dot(half)}" for n, half in enumerate(halves)]
    if n_minima == 2:
        terms += [f"minimum{n} * as_float(sum{n})" for n in range(2)]
    product = f"as_float(step) * ({' + '.join(terms)})"
    return [
        *lines,
        f"product = {product}{' + as_float(sum_of_a) * minimum0' if n_minima == 1 else ''}",
    ]


def _dot(words: range) -> str:
    """The product of both digits of A and of words of W."""
    high = low = "np.int32(0)"
    for n in words:
        high, low = f"dot_bytes(a{n}, h{n}, {high})", f"dot_bytes(a{n}, l{n}, {low})"
    return f"np.float32(np.int32(({high} << np.int32(8)) + {low}))"


@cache
def _multiplier(unit: PackedUnit, rows: int, has_halves: bool) -> Any:
    names = {**vocabulary(), "ZERO": ZERO, "dot_bytes": byte_ptx.dot_bytes}
    function = compile_closure(source_of(unit, rows, has_halves), "multiply_unit", names)
    return straight(function, floats(rows))


# -- a chunk -------------------------------------------------------------------------------------


@cache
def _fetcher(unit: PackedUnit, is_whole: bool) -> Any:
    n_bytes = CHUNK * unit.n_bytes
    copy = byte_ptx.copier(n_bytes)

    @device
    def fetch(memory, to, w, start):
        """Begin to copy the chunk that starts at byte `start` of w, by the lanes of a warp."""
        own = 16 * (cuda.threadIdx.x & 31)
        if is_whole or start + n_bytes <= w.size:
            copy(memory, to + own, w, start + own)
        else:
            for at in range(own, min(n_bytes, w.size - start), 512):
                left = np.int32(min(16, w.size - start - at))
                ptx.copy_16(memory, to + at, w, start + at, left)

    return fetch


@cache
def _chunk_fetcher(kind: DotShape) -> Any:
    """What begins to copy a chunk of a block, if it has as many. Of a gated product, every other
    chunk is the gate's."""
    fetch_chunk, chunk_bytes = _fetcher(kind.unit, kind.is_whole), CHUNK * kind.unit.n_bytes
    is_gated = kind.is_gated

    @device
    def fetch(memory, to, part, first, task, n_tasks):
        if task < n_tasks:
            w = part[2]
            if is_gated and task & 1:
                w = part[3]
            fetch_chunk(memory, to, w, first + (task >> is_gated) * chunk_bytes)
        ptx.commit_copies()

    return fetch


@cache
def _bounds(kind: DotShape) -> Any:
    row_bytes, n_units = kind.units * kind.unit.n_bytes, kind.units << kind.is_gated

    @device
    def bounds(first_row, n_rows):
        """Where the chunks of a block begin, in bytes, and how many it has."""
        return first_row * row_bytes, n_rows * n_units // CHUNK

    return bounds


@cache
def grid_filler(unit: PackedUnit) -> Any:
    """What copies the grids of W's type to shared memory, where a warp reads 32 rows at once."""
    words = grid_words_of(unit)
    if not words.size:
        return None
    load, n = byte_ptx.constants_loader(f"grids_{unit.name}", words), words.size // 4

    @device
    def fill(memory, to):
        i = np.int64(cuda.threadIdx.x)
        while i < n:
            a, b, c, d = load(i)
            byte_ptx.put_shared_words(memory, to + 16 * i, a, b, c, d)
            i += cuda.blockDim.x

    return fill


@cache
def beginner(kind: DotShape) -> Any:
    begin, fill = _copies_beginner(kind), grid_filler(kind.unit)
    if fill is None:
        return begin

    @device
    def begin_with_grids(memory, part, layout, first_row, n_rows):
        begin(memory, part, layout, first_row, n_rows)
        fill(memory, layout.grids)

    return begin_with_grids


@cache
def _copies_beginner(kind: DotShape) -> Any:
    fetch, bounds = _chunk_fetcher(kind), _bounds(kind)

    @device
    def begin(memory, part, layout, first_row, n_rows):
        """Begin to copy each warp's first chunks. All but the last copies that are asked for are
        there when `add` has waited: where a warp has room for one chunk, the last are none."""
        warp, n_warps = cuda.threadIdx.x >> 5, cuda.blockDim.x >> 5
        first, n_tasks = bounds(first_row, n_rows)
        here = layout.chunks + warp * layout.chunk
        fetch(memory, here, part, first, warp, n_tasks)
        if layout.second:
            fetch(memory, here + layout.second, part, first, warp + n_warps, n_tasks)
        else:
            ptx.commit_copies()

    return begin


@cache
def _sum_putters(kind: DotShape) -> tuple[Any, Any]:
    """What writes a lane's sum of a task and of row t; and its sums of the last two tasks of a
    warp, of which the next one would be `task`, where there have been as many."""
    rows, is_gated = kind.rows, kind.is_gated

    @device
    def put(floats, layout, cut, task, t, total):
        of_matrix = ((task & is_gated) * rows + t) * cut.most
        number = (task >> is_gated) * CHUNK + (cuda.threadIdx.x & 31)
        floats[np.uint64((layout.sums >> 2) + of_matrix + number)] = total

    @device
    def put_both(floats, layout, cut, task, last, before):
        n_warps = cuda.blockDim.x >> 5
        if task >= n_warps:
            put(floats, layout, cut, task - n_warps, 0, last)
        if task >= 2 * n_warps:
            put(floats, layout, cut, task - 2 * n_warps, 0, before)

    return put, put_both


@cache
def adder(kind: DotShape) -> Any:
    unit, units, rows, is_gated = kind.unit, kind.units, kind.rows, kind.is_gated
    multiply, fetch = _multiplier(unit, rows, kind.has_halves), _chunk_fetcher(kind)
    bounds, x_unit = _bounds(kind), digits.unit_digits(unit.n_groups)
    f_unit, over_a = digits.unit_factors(unit.n_groups, kind.has_halves), kind.over_a
    put, put_both = _sum_putters(kind)

    @device
    def add(memory, floats, part, layout, first_row, n_rows):
        """Multiply all chunks of a block, of which each warp's first ones are on their way."""
        warp, n_warps, lane = cuda.threadIdx.x >> 5, cuda.blockDim.x >> 5, cuda.threadIdx.x & 31
        cut, here = part[5], layout.chunks + warp * layout.chunk
        first, n_tasks = bounds(first_row, n_rows)
        there, step = here + layout.second, 2 * n_warps if layout.second else n_warps
        task, last, before = np.int64(warp), ZERO, ZERO
        while task < n_tasks:
            number = (task >> is_gated) * CHUNK + lane
            of_row = np.int64(np.uint32(number) % np.uint32(units))
            x, f = of_row * x_unit, rows * layout.a.digits + of_row * f_unit
            ptx.await_all_but_one()
            cuda.syncwarp()
            at = here + lane * unit.n_bytes
            steps = layout.a.digits, layout.a.factors
            products = multiply(memory, at, layout.grids, x, f, steps[0], steps[1])
            cuda.syncwarp()  # before the next copies
            fetch(memory, here, part, first, task + step, n_tasks)
            if not layout.second:
                ptx.commit_copies()
            here, there = there, here
            if over_a:
                last, before = products[0], last
            else:
                for t in range(rows):
                    put(floats, layout, cut, task, t, products[t])
            task += n_warps
        if over_a:
            cuda.syncthreads()
            put_both(floats, layout, cut, task, last, before)

    return add


# -- a part --------------------------------------------------------------------------------------
# (out, added, w, up, n, cut, adds): the result; what is added to it, if `adds`; W, and the other
# matrix of a gated product; rows of W; the Cut.


@device
def rows_of(cut, number):
    """The first row of block `number` of a part, and how many it has."""
    first = (number * cut.slabs + min(number, cut.more)) * cut.slab
    return first, (cut.slabs + (1 if number < cut.more else 0)) * cut.slab


@device
def row_sum(floats, at, n):
    total = ZERO
    for i in range(n):
        total += byte_ptx.shared_float(floats, at + i)
    return total


@cache
def adds_reader(rows: int) -> Any:
    @device
    def read_added(held, part, first, n_rows):
        """What is added to a thread's first row: it is on its way while chunks are multiplied."""
        if part[6] and cuda.threadIdx.x < n_rows:
            for t in range(rows):
                held[t] = part[1][np.uint64(t * part[4] + first + cuda.threadIdx.x)]

    return read_added


@cache
def finisher(kind: DotShape, has_norm: bool) -> Any:
    units, rows, is_gated = kind.units, kind.rows, kind.is_gated
    rate_of, keep = digits.rater(has_norm), _keeper(has_norm)

    @device
    def finish(floats, held, part, a, k, layout, norm, first, n_rows):
        """Write the results of a block's rows. held: as read_added leaves it"""
        cut, sums = part[5], layout.sums >> 2
        for t in range(rows):
            rate = rate_of(floats, t, k, layout.a, norm)
            row = np.int64(cuda.threadIdx.x)
            while row < n_rows:
                at = np.uint64(t * part[4] + first + row)
                place = sums + t * cut.most + row * units
                total = rate * row_sum(floats, place, units)
                if is_gated:
                    place += rows * cut.most
                    total = silu(total) * (rate * row_sum(floats, place, units))
                elif part[6]:
                    total += held[t] if row == cuda.threadIdx.x else part[1][at]
                part[0][at] = total
                row += cuda.blockDim.x
            keep(a, k, norm, t, rate)

    return finish


def _keeper(has_norm: bool) -> Any:
    @device
    def keep(a, k, norm, t, rate):
        """Write a row of the normalised A, if others read it; by the first block."""
        if has_norm and norm[3] and cuda.blockIdx.x == 0:
            i = np.int64(cuda.threadIdx.x)
            while i < k:
                at = np.uint64(t * k + i)
                norm[2][at] = a[at] * rate * norm[0][np.uint64(i)]
                i += cuda.blockDim.x

    return keep
