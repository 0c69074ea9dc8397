"""The table of paths: the first that takes a product computes it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np

from pyggml.graph.call import Call, one_by_one
from pyggml.graph.dtypes import BF16, F32
from pyggml.jit.isa import CHOSEN
from pyggml.kernels.gemm import (
    by_rows,
    few,
    few_bits,
    int8,
    low_rank,
    product,
    reference,
    several,
    strided,
    thin,
)
from pyggml.kernels.gemm.amx import product as tiles
from pyggml.kernels.gemm.beside import round_all
from pyggml.kernels.gemm.path import PROBLEMS, Adds, Operands, Problem, ProductPath, layout_of

# Without compiled products NumPy computes them all.
_ALL = () if CHOSEN.compiled else (reference.NUMPY,)
# Where the CPU has tile registers: above bytes, and above floats.
_MANY = (tiles.MANY,) if CHOSEN.tiles else ()
_SOME = (tiles.SOME,) if CHOSEN.tiles else ()
# Without VNNI, rows as they lie are faster. Tiles of bytes at 512 bits were not timed there.
_LANES = () if CHOSEN.byte_pairs else (several.INT8,)
_BYTES = () if CHOSEN.byte_pairs and CHOSEN.lanes == 16 else (int8.INT8,)
# Without VNNI weights of few bits have tiles of their own. With few tokens too tiles are faster,
# unless 16 weights share a scale. GFLOP/s of Q4_K with 4, 6 and 12 tokens: 101, 152 and 204, by
# rows 94, 76, 96; of Q8_0 77, 118, 148, and 100, 76, 101; of Q6_K 34, 52, 82, and 100, 78, 102.
_FEW_BITS = (few_bits.FEW_BITS, few_bits.TWO_SCALES) if few_bits.KINDS else ()


def _of_few_tokens(path: ProductPath) -> ProductPath:
    return replace(
        path, name=f"{path.name}, few tokens", fewest=several.FEWEST, most=by_rows.MOST,
        takes=lambda p: int8.rounds_no_weights(p) and path.takes(p),
    )  # fmt: skip


_IN_TILES = tuple(map(_of_few_tokens, (few_bits.FEW_BITS, int8.INT8))) if few_bits.KINDS else ()
PATHS: tuple[ProductPath, ...] = (
    *_ALL,
    *_LANES,
    *_IN_TILES,
    by_rows.INT8,
    few.FLOATS,
    thin.DOTS,
    thin.OUTER,
    thin.OUTER_TRANSPOSED,
    low_rank.LOW_RANK,
    strided.STRIDED,
    *_MANY,
    *_FEW_BITS,
    *_BYTES,
    *_SOME,
    product.BF16,
    product.F32,
)
# Numbers of A that are packed at a time, of gradients of and with large matrices; its rows in whole
# groups of every tile, its depth in whole passes of every path.
_PACKED, _PARTS = 1 << 21, (96, 3072)


@lru_cache(PROBLEMS)
def path_of(p: Problem) -> ProductPath:
    """The path that computes a product."""
    return next(path for path in PATHS if path.serves(p))


@lru_cache(PROBLEMS)
def scratch_bytes(p: Problem, fewer_rows: bool = False) -> int:
    """Scratch of a product. With fewer_rows: enough for it with any smaller number of rows of A."""
    row_counts = largest_of_each_path(p.m) if fewer_rows else [p.m]
    problems = [q for m in row_counts for q in _calls_of(replace(p, m=m))]
    sizes = (layout_of(path_of(q), q).n_bytes for q in problems if not _is_empty(q))
    return max(sizes, default=0)


def _is_empty(p: Problem) -> bool:
    """Whether there is nothing to multiply: the product is empty or all zeros."""
    return 0 in (p.m, p.n, p.k, p.n_batches)


def _is_joined(p: Problem) -> bool:
    """Whether one path computes all: what is beside too, or nothing is."""
    return not p.rank or not (_is_empty(p) or not path_of(p).joins)


def _calls_of(p: Problem) -> list[Problem]:
    """The products that are computed: this one, its parts or, if its path adds nothing beside it,
    two."""
    return [q for q, *_ in _parts(p)] if _is_joined(p) else [replace(p, rank=0), thin_of(p)]


@lru_cache(PROBLEMS)
def _parts(p: Problem) -> list[tuple[Problem, slice, slice]]:
    """Products one after the other, each with its rows of C and its part of k. Those of a matrix in
    BF16 pack so much of A that it stays in the last cache. The bits are the same."""
    rows, depth, per_row, per_number = p.m, p.k, *_PARTS
    is_large = p.form == "out_prod" and not p.rank and p.m * p.k > _PACKED
    if is_large and (p.weight_type is BF16 or p.rounds_w):
        if p.a_in_columns:
            rows = max(1, _PACKED // (p.k * per_row)) * per_row
        else:
            depth = max(1, _PACKED // (p.m * per_number)) * per_number
    by_rows = _slices(p.m, rows)
    if len(by_rows) > 1 and path_of(replace(p, m=p.m - by_rows[-1].start)) is not path_of(p):
        *by_rows, last, _ = by_rows  # so few rows have another path, whose bits differ
        by_rows.append(slice(last.start, p.m))
    return [
        (replace(p, m=len(range(p.m)[i]), k=len(range(p.k)[k])), i, k)
        for i in by_rows
        for k in _slices(p.k, depth)
    ]


def _slices(n: int, each: int) -> list[slice]:
    return [slice(i, i + each) for i in range(0, max(1, n), max(1, each))]


def takes_narrow(p: Problem) -> bool:
    """Whether A may be of bfloat16, and a W in whole steps of float32 that is rounded."""
    is_whole = p.n % 32 == p.k % 32 == 0 if p.rounds_w else p.m % 2 == p.k % 2 == 0
    return is_whole and all(path_of(q).narrow for q, *_ in _parts(p))


def thin_of(p: Problem) -> Problem:
    """The product of low rank beside a product, as a problem of its own."""
    return Problem(p.form, p.m, p.n, p.rank)


def call_of(p: Problem, o: Operands) -> Call:
    """The product, bound to its memory, on the path whose scratch was reserved."""
    if o.beside is None or (p.rank and _is_joined(p)):
        return _plain_call(p, o)
    backward = (
        p.form == "out_prod"
    )  # what is beside then comes first, see pyggml.kernels.gemm.beside
    whole, thin = replace(p, rank=0), thin_of(p)
    d, b, rounded = o.beside
    own = replace(o, accumulate=True if backward else o.accumulate, beside=None)
    other = Operands(o.c, d, b, o.scratch, o.accumulate if backward else True)
    calls = [_plain_call(whole, own), _plain_call(thin, other)]
    if rounded is not None:
        calls.append(Call(round_all, rounded.reshape(-1), o.c.reshape(-1)))
    return Call(one_by_one, calls[::-1] if backward else calls)


def _plain_call(p: Problem, o: Operands) -> Call:
    """The product on one path. Without a number to multiply, C becomes zeros or stays as it is."""
    if _is_empty(p):
        return Call(_begin, o.c, o.accumulate)
    if len(parts := _parts(p)) == 1:
        return path_of(p).call(p, o)
    calls = []
    for q, i, k in parts:
        accumulate = True if k.start > 0 else o.accumulate
        part = replace(o, c=o.c[i], a=o.a[i, k], b=o.b[k], accumulate=accumulate)
        calls.append(path_of(q).call(q, part))
    return Call(one_by_one, calls)


def _begin(c: np.ndarray, accumulate: Adds) -> None:
    if not accumulate:
        c.fill(0)


def largest_of_each_path(m: int) -> Iterator[int]:
    """m, and each smaller number of rows that is the most of some path."""
    yield m
    for path in PATHS:
        yield from (n for n in (path.fewest - 1, path.most) if 0 < n < m)


@lru_cache(PROBLEMS)
def packing(p: Problem) -> tuple[int, str]:
    """(bytes of a packed A that products can share, 0 if none; a word for its form).

    Products with float32 matrices (adapters, or small) share none.
    """
    if _is_empty(p):
        return 0, ""
    path = path_of(p)
    if not path.shares or (p.weight_type is F32 and not p.rounds_w):
        return 0, ""
    form = f"{path.name}, {p.weight_type}" if path.packs_by_type else path.name
    return layout_of(path, p)["packed_a"].n_bytes, form
