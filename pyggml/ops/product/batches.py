"""Products with axes of batches: how they become calls. Float32 matrices have any strides.

Batch i of the result takes batch i // r of a source that has r times fewer batches.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from pyggml.graph.call import Call, one_by_one
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import Shape, Tensor
from pyggml.kernels import gemm
from pyggml.kernels.kernel import as_four, as_rows

_CASES = 1024  # whose problem is remembered


class Matrices(NamedTuple):
    """Matrices in memory: (…, rows, columns), and the bytes from each to the next."""

    shape: Shape
    strides: Shape


def matrices_of(t: Tensor) -> Matrices:
    """The matrices of t as they lie."""
    return Matrices(t.shape, t.strides)


def transposed_matrices(t: Tensor) -> Matrices:
    """The matrices of t with its last two axes exchanged."""
    shape, strides = t.shape, t.strides
    return Matrices((*shape[:-2], shape[-1], shape[-2]), (*strides[:-2], strides[-1], strides[-2]))


def strided(
    p: gemm.Problem,
    c: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    scratch: np.ndarray,
    accumulate: gemm.Adds,
) -> Call:
    """c (+)= a · bᵀ; b may have fewer batches. p: their `strided_problem`.

    The kernel walks one axis of batches and repeats b along it. Batches that cannot be viewed as
    one axis are multiplied one after the other.
    """
    if _is_by_outer(c.shape, a, b):
        b = b.reshape((1,) * (c.ndim - b.ndim) + b.shape)
        r = c.shape[0] // b.shape[0]
        outer = range(c.shape[0])
        calls = [strided(p, c[i], a[i], b[i // r], scratch, accumulate) for i in outer]
        return Call(one_by_one, calls)
    o = gemm.Operands(_as_batches(c), _as_batches(a), _as_batches(b), scratch, accumulate)
    return gemm.call_of(p, o)


def by_matrix(
    c: np.ndarray, rows: np.ndarray, w: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(part of c, rows of it, matrix) for every matrix of w, batches of c without gaps.

    Neighbouring batches with one matrix are rows of one product.
    """
    c, rows, w = (as_four(a) for a in (c, rows, w))
    repeats, neighbours = c.shape[0] // w.shape[0], c.shape[1] // w.shape[1]
    for i in range(c.shape[0]):
        for j in range(w.shape[1]):
            batches = slice(j * neighbours, (j + 1) * neighbours)
            yield as_rows(c[i, batches]), as_rows(rows[i, batches]), w[i // repeats, j]


def _as_batches(a: np.ndarray) -> np.ndarray:
    """(…, rows, columns) as (batches, rows, columns), no copy where the strides allow."""
    return a.reshape(prod(a.shape[:-2]), *a.shape[-2:])


def _is_by_outer(c: Shape, a: Matrices | np.ndarray, b: Matrices | np.ndarray) -> bool:
    """Whether each element of the outer axis of batches needs a call of its own."""
    if len(c) < 4:
        return False
    outer, inner = (1, 1, *b.shape)[-4:-2]
    repeats = c[0] // outer > 1 and inner > 1
    return repeats or not (_is_one_axis(a) and _is_one_axis(b))


def _is_one_axis(a: Matrices | np.ndarray) -> bool:
    """Whether the axes of batches can be viewed as one."""
    if len(a.shape) < 4 or 1 in a.shape[:2]:
        return True
    return a.strides[0] == a.shape[1] * a.strides[1]


@lru_cache(_CASES)
def strided_problem(c: Shape, a: Matrices, b: Matrices) -> gemm.Problem:
    """Each call of `strided` for a result of this shape and these factors."""
    *batches, m, n = c
    n_batches = prod(batches[1:] if _is_by_outer(c, a, b) else batches)
    return gemm.Problem(
        "strided", m, n, a.shape[-1], n_batches=n_batches, a_in_columns=_in_columns(a),
        b_in_columns=_in_columns(b),
    )  # fmt: skip


def _in_columns(a: Matrices) -> bool:
    """Whether matrices lie column by column.

    A single row has the step that NumPy's reshape gives it, its whole length; so it counts only if
    it is one number.
    """
    step = a.strides[-2] if a.shape[-2] > 1 else a.shape[-1] * a.strides[-1]
    return step == F32.block_bytes
