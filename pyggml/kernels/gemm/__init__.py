"""Matrix products with a weight of any type or with float32 of any strides, bound as calls.

mul_mat    y (+)= x · Wᵀ      out_prod    dx (+)= dy · W      strided    c (+)= a · bᵀ

`compute` says how a weight is multiplied. "f32" is exact. "bf16" rounds both factors to bfloat16
and sums in float32. "int8" rounds both to bytes where the weight's blocks hold whole numbers, and
does as FLOATS says elsewhere. Float32 weights are always multiplied exactly.

A planner asks the table of paths for a Problem's scratch. `call_of` binds the same Problem, and so
on the path whose scratch was reserved.
"""

from dataclasses import dataclass

import numpy as np

from pyggml.graph.call import Call
from pyggml.graph.dtypes import DType
from pyggml.jit.isa import CHOSEN
from pyggml.kernels.gemm.choice import FASTEST, FLOATS, rounds, rounds_matrices
from pyggml.kernels.gemm.path import Adds, Form, LowRank, Operands, Packing, Problem
from pyggml.kernels.gemm.paths import PATHS, call_of, packing, path_of, scratch_bytes, takes_narrow
from pyggml.kernels.gemm.tile import BYTE_TILE, FLOAT_TILE
from pyggml.kernels.kernel import Compute

__all__ = [
    "BYTE_TILE", "CHOSEN", "FASTEST", "FLOATS", "FLOAT_TILE", "PATHS", "Adds", "Form", "LowRank",
    "Operands", "Packing", "Problem", "Weight", "call_of", "mul_mat", "out_prod", "packing",
    "path_of", "rounds", "rounds_matrices", "scratch_bytes", "strided", "strided_problem",
    "takes_narrow",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix (N, row of bytes or numbers) of any type, and how it is to be multiplied."""

    data: np.ndarray
    dtype: DType
    compute: Compute


def mul_mat(
    y: np.ndarray,
    x: np.ndarray,
    w: Weight,
    scratch: np.ndarray,
    accumulate: bool,
    packing: Packing | None = None,
) -> Call:
    """y (T, N) (+)= x (T, K) · wᵀ. y has no gaps, nor have the rows of x."""
    p = Problem("mul_mat", len(x), len(w.data), x.shape[1], w.dtype, w.compute)
    return call_of(p, Operands(y, x, w.data, scratch, accumulate, packing))


def out_prod(
    dx: np.ndarray, dy: np.ndarray, w: Weight, scratch: np.ndarray, accumulate: bool
) -> Call:
    """dx (T, K) (+)= dy (T, N) · w. dx has no gaps, nor have the rows of dy."""
    p = Problem("out_prod", len(dy), dx.shape[1], dy.shape[1], w.dtype, w.compute)
    return call_of(p, Operands(dx, dy, w.data, scratch, accumulate))


def strided(
    c: np.ndarray, a: np.ndarray, b: np.ndarray, scratch: np.ndarray, accumulate: bool
) -> Call:
    """c (B, M, N) (+)= a (B / i, M, K) · b (B / j, N, K)ᵀ; float32, c contiguous, a and b not.

    Batch n of c takes batch n // i of a and n // j of b, as ggml broadcasts.
    """
    return call_of(strided_problem(c, a, b), Operands(c, a, b, scratch, accumulate))


def strided_problem(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> Problem:
    """The problem that `strided` solves for these arrays."""
    n_batches, m, n = c.shape
    a_in_columns, b_in_columns = (x.strides[1] == 4 for x in (a, b))
    return Problem(
        "strided", m, n, a.shape[2], n_batches=n_batches, a_in_columns=a_in_columns,
        b_in_columns=b_in_columns,
    )  # fmt: skip
