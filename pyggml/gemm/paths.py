"""The table of paths: the first that takes a product computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pyggml._isa import CHOSEN
from pyggml.dtypes import F32
from pyggml.gemm import few, int8, product, reference, strided, thin
from pyggml.gemm.amx import product as tiles
from pyggml.gemm.path import Path, Problem

# Where the CPU has tile registers: above bytes, and above floats.
_MANY = (tiles.MANY,) if CHOSEN.tiles else ()
_SOME = (tiles.SOME,) if CHOSEN.tiles else ()
PATHS: tuple[Path, ...] = (
    reference.NUMPY,
    few.INT8,
    few.FLOATS,
    thin.DOTS,
    thin.OUTER,
    strided.STRIDED,
    *_MANY,
    int8.INT8,
    *_SOME,
    product.BF16,
    product.F32,
)


def path_of(p: Problem) -> Path:
    """The path that computes a product."""
    return next(path for path in PATHS if path.serves(p))


def scratch_bytes(p: Problem, fewer_rows: bool = False) -> int:
    """Scratch of a product; with fewer_rows, of any that has at most so many rows of A."""
    some = _largest_of_each_path(p.m) if fewer_rows else [p.m]
    problems = (replace(p, m=m) for m in some)
    return max(path_of(q).layout(q).n_bytes for q in problems)


def _largest_of_each_path(m: int) -> Iterator[int]:
    """m, and the smaller numbers of rows after which another path may serve."""
    yield m
    for path in PATHS:
        yield from (n for n in (path.fewest - 1, path.most) if 0 < n < m)


def packing(p: Problem) -> tuple[int, str]:
    """Bytes of packed A that products can share, 0 if none, and a word for its form.

    Matrices of float32 are adapters, or small: they pack A for themselves.
    """
    path = path_of(p)
    if not path.shares or p.weight_type is F32:
        return 0, ""
    return path.layout(p)["packed_a"].n_bytes, path.name


def strided_bytes(m: int, k: int, n_batches: int = 1) -> int:
    """Scratch of a strided product of this sum's length, however its matrices lie."""
    p = Problem("strided", m, thin.WIDEST, k, n_batches=n_batches)
    problems = (p, replace(p, a_in_columns=True), replace(p, b_in_columns=True))
    return max(path_of(q).layout(q).n_bytes for q in problems)
