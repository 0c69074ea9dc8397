"""Products of float32 matrices of any strides, with axes of batches: how they become calls.

Batch i of the result takes batch i // r of a source that has r times fewer batches.
"""

from __future__ import annotations

from math import prod

import numpy as np

from pyggml import gemm
from pyggml.call import Call, one_by_one
from pyggml.dtypes import F32
from pyggml.tensors import Tensor

Matrices = Tensor | np.ndarray  # whose shape and strides are asked


def strided(
    c: np.ndarray, a: np.ndarray, b: np.ndarray, scratch: np.ndarray, accumulate: bool
) -> Call:
    """c (+)= a · bᵀ; b may have fewer batches.

    The kernel walks one axis of batches and repeats b along it. Batches that cannot be viewed as
    one axis are multiplied one after the other.
    """
    if _is_by_outer(c, a, b):
        b = b.reshape((1,) * (c.ndim - b.ndim) + b.shape)
        r = c.shape[0] // b.shape[0]
        outer = range(c.shape[0])
        calls = [strided(c[i], a[i], b[i // r], scratch, accumulate) for i in outer]
        return Call(one_by_one, calls)
    return gemm.strided(_as_batches(c), _as_batches(a), _as_batches(b), scratch, accumulate)


def _as_batches(a: np.ndarray) -> np.ndarray:
    """(…, rows, columns) as (batches, rows, columns), no copy where the strides allow."""
    return a.reshape(-1, *a.shape[-2:])


def _is_by_outer(c: Matrices, a: Matrices, b: Matrices) -> bool:
    """Whether the outer of two axes of batches needs a call for each of its elements."""
    if len(c.shape) < 4:
        return False
    outer, inner = (1, 1, *b.shape)[-4:-2]
    repeats = c.shape[0] // outer > 1 and inner > 1
    return repeats or not (_is_one_axis(a) and _is_one_axis(b))


def _is_one_axis(a: Matrices) -> bool:
    """Whether the axes of batches can be viewed as one."""
    if len(a.shape) < 4 or 1 in a.shape[:2]:
        return True
    return a.strides[0] == a.shape[1] * a.strides[1]


def transposed(t: Tensor) -> Tensor:
    """The shape and strides of t with its last two axes exchanged; no node."""
    shape, strides = ((*x[:-2], x[-1], x[-2]) for x in (t.shape, t.strides))
    return Tensor(shape, t.dtype, strides=strides)


def strided_problem(c: Tensor, a: Tensor, b: Tensor) -> gemm.Problem:
    """The problem of each call that `strided` makes of c (+)= a · bᵀ."""
    *batches, m, n = c.shape
    n_batches = prod(batches[1:] if _is_by_outer(c, a, b) else batches)
    return gemm.Problem(
        "strided", m, n, a.shape[-1], n_batches=n_batches, a_in_columns=_in_columns(a),
        b_in_columns=_in_columns(b),
    )  # fmt: skip


def _in_columns(t: Tensor) -> bool:
    """Whether its matrices lie column by column. That of one row does if it is one number."""
    step = t.strides[-2] if t.shape[-2] > 1 else t.shape[-1] * t.strides[-1]
    return step == F32.block_bytes
