"""Blocks of any weight type unpacked to bfloat16 or float32, and float32 rounded to bfloat16.

Results may lie in wider rows: row r of n numbers begins at r · (n + gap). A small matrix can be
rounded into the gaps, or below, by the same launch.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.code.fours import load_four, start_of, vectorizable
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.ptx import bf16_bits, put_eight, put_eight_bf16, put_four_bf16
from pyggml.backends.cuda.runtime.driver import address, cuda
from pyggml.backends.cuda.runtime.launches import THREADS, launch, launches, per_element
from pyggml.backends.cuda.weights.readers import eights_of, weight_of
from pyggml.graph.call import Call
from pyggml.graph.dtypes import DType
from pyggml.quants.layout import GROUP

_PIECES = GROUP // 8  # threads that share a block
MOST_HALF = np.float32(65504)  # of float16


@device
def _wide(i, row, gap):
    """Where number i of rows of `row` numbers lies in rows that are wider by `gap`."""
    return i if gap == 0 else i + np.int64(np.uint32(i) // np.uint32(row)) * gap


@device
def _put_bf16(out, i, x):
    out[i] = bf16_bits(x)


@device
def _put(out, i, x):
    out[i] = x


@cache
def _one_step(name: str, block: int, block_bytes: int, rounds: bool) -> Any:
    """step(out, raw, i, row, gap): weight i."""
    put, weight = _put_bf16 if rounds else _put, weight_of(name)

    @device
    def step(out, raw, i, row, gap):
        b = i // block
        put(out, _wide(i, row, gap), weight(raw, b * block_bytes, i - b * block))

    return step


@cache
def _eights_step(name: str, block: int, block_bytes: int, rounds: bool) -> Any:
    """The same of eight neighbours in each group of 32 of a block."""
    eights = eights_of(name, put_eight_bf16 if rounds else put_eight)

    @device
    def step(out, raw, i, row, gap):
        b = i // _PIECES
        eights(out, _wide(b * block, row, gap), raw, b * block_bytes, i % _PIECES * 8)

    return step


@cache
def _kernel(step: Any) -> Any:
    @kernel
    def unpack(out, raw, n, row, gap):
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            step(out, raw, i, row, gap)

    return unpack


class Thin(NamedTuple):
    """Where a float32 matrix (rows, row) goes, beside or below unpacked weights.

    Its place in `out` begins at `at`, each row of it `step` after the one before; its rows begin in
    column `first` of the place. The rest of the place is filled with zeros. Multiples of 8: at,
    step, n_columns.
    """

    rows: int
    row: int
    at: int
    step: int
    n_rows: int
    n_columns: int
    first: int = 0


@device
def _number_of(thin, source, i, j, p):
    is_there = i < p.rows and j >= 0 and j < p.row
    return thin[np.uint64(source + i * p.row + j)] if is_there else np.float32(0)


@device
def _place_eight(out, thin, source, e, p):
    """Eight neighbours of the place of a thin matrix, which begins at number `source`, in
    bfloat16."""
    i, column = e // (p.n_columns // 8), e % (p.n_columns // 8) * 8
    j = column - p.first
    put_eight_bf16(
        out, p.at + i * p.step + column,
        _number_of(thin, source, i, j, p), _number_of(thin, source, i, j + 1, p),
        _number_of(thin, source, i, j + 2, p), _number_of(thin, source, i, j + 3, p),
        _number_of(thin, source, i, j + 4, p), _number_of(thin, source, i, j + 5, p),
        _number_of(thin, source, i, j + 6, p), _number_of(thin, source, i, j + 7, p),
    )  # fmt: skip


@cache
def _kernel_beside(step: Any) -> Any:
    @kernel
    def unpack_beside(out, raw, n, row, gap, thin, place):
        n_eights = place.n_rows * (place.n_columns // 8)
        for i in range(cuda.grid(1), n + n_eights, cuda.gridsize(1)):
            if i < n:
                step(out, raw, i, row, gap)
            else:
                _place_eight(out, thin, 0, i - n, place)

    return unpack_beside


def _step_of(out: Any, raw: Any, dtype: DType, gap: int) -> tuple[Any, int]:
    """(the step that unpacks raw, how many it takes)."""
    n = raw.size // dtype.block_bytes * dtype.block
    kind = dtype.name, dtype.block, dtype.block_bytes, out.dtype != np.float32
    if dtype.block > 1 and gap % 8 == 0 and start_of(out) % 16 == 0:
        return _eights_step(*kind), n // dtype.block * _PIECES
    return _one_step(*kind), n


def unpack(out: Any, raw: Any, dtype: DType, stream: Any) -> Call:
    """A call that unpacks the blocks of raw (bytes) to out, of float32 or, as uint16, bfloat16."""
    step, n = _step_of(out, raw, dtype, 0)
    return per_element(_kernel(step), n, stream, out, raw, n, 1, 0)


def unpacked_beside(
    out: Any, raw: Any, dtype: DType, stream: Any, row: int, gap: int, thin: Any, place: Thin
) -> Call:
    """The same to rows of bfloat16 that are wider by `gap`, and a thin matrix to its place."""
    step, n = _step_of(out, raw, dtype, gap)
    n_threads = n + place.n_rows * (place.n_columns // 8)
    return per_element(_kernel_beside(step), n_threads, stream, out, raw, n, row, gap, thin, place)


@kernel
def _place(out, thin, place):
    n_eights = place.n_rows * (place.n_columns // 8)
    for i in range(cuda.grid(1), n_eights, cuda.gridsize(1)):
        _place_eight(out, thin, 0, i, place)


@kernel
def _place_all(out, thin, table):
    """Thin matrices, a row of blocks for each. table: of each, where it begins, counted from where
    `thin` does, and its place, counted from where `out` does."""
    t = table[cuda.blockIdx.y]
    place = Thin(t[1], t[2], t[3], t[4], t[5], t[6], t[7])
    n_eights = place.n_rows * (place.n_columns // 8)
    for i in range(cuda.grid(1), n_eights, cuda.gridsize(1)):
        _place_eight(out, thin, t[0], i, place)


def is_placing(call: Call) -> bool:
    """Whether a call is one of `place_thin`."""
    return any(run is _place for run, _ in launches(call))


def placed_at_once(calls: Sequence[Call], stream: Any) -> Call:
    """One launch that does what these of `place_thin` do."""
    each = [arguments for call in calls for _, arguments in launches(call)]
    out, thin = (min((a[i] for a in each), key=address) for i in range(2))
    table = np.array(
        [
            ((address(source) - address(thin)) // thin.dtype.itemsize,
             *p._replace(at=(address(around) - address(out)) // out.dtype.itemsize))
            for around, source, p in each
        ]
    )  # fmt: skip
    most = max(p.n_rows * (p.n_columns // 8) for *_, p in each)
    grid = max(1, -(-most // (4 * THREADS))), len(each)
    return launch(_place_all, grid, THREADS, stream, out, thin, cuda.to_device(table))


def place_thin(out: Any, thin: Any, place: Thin, stream: Any) -> Call:
    """A call that rounds a thin matrix to its place alone, beside or below what is unpacked."""
    last = place.at + (place.n_rows - 1) * place.step + place.n_columns
    around = out[place.at : last]
    n, at = place.n_rows * (place.n_columns // 8), place._replace(at=0)
    return per_element(_place, n, stream, around, thin, at, writes=[around])


@kernel
def _round(out, x):
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        out[i] = bf16_bits(x[i])


@kernel
def round_fours(out, x):
    for i in range(cuda.grid(1), x.size // 4, cuda.gridsize(1)):
        a, b, c, d = load_four(x, 4 * i)
        put_four_bf16(out, 4 * i, a, b, c, d)


def round_to_bfloat16(out: Any, x: Any, stream: Any) -> Call:
    """A call that rounds float32 x to bfloat16 in out (uint16)."""
    if vectorizable(out, x):
        return per_element(round_fours, x.size // 4, stream, out, x)
    return per_element(_round, x.size, stream, out, x)


@kernel
def _round_to_halves(out, x):
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        out[i] = min(max(x[i], -MOST_HALF), MOST_HALF) if x[i] == x[i] else x[i]


def round_to_float16(out: Any, x: Any, stream: Any) -> Call:
    """A call that rounds float32 x to float16 in out; what is larger becomes the largest."""
    return per_element(_round_to_halves, x.size, stream, out, x)
