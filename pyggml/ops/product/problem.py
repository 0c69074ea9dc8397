"""What the CPU computes for a product's node. `problem_of` says it, from shapes and strides alone;
the node's scratch, the packing that it shares and its call all follow from that.
"""

from math import prod

import numpy as np

from pyggml.graph.call import Call, one_by_one
from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.tensor import Tensor
from pyggml.kernels import gemm
from pyggml.kernels.kernel import Compute, Site, as_rows
from pyggml.ops.product.batches import (
    by_matrix,
    matrices_of,
    strided,
    strided_problem,
    transposed_matrices,
)


def swap_axes(t: Tensor) -> Tensor:
    """t with its last two axes exchanged; no node."""
    shape, strides = transposed_matrices(t)
    return Tensor(shape, t.dtype, strides=strides)


def problem_of(form: gemm.Form, node: Tensor, rows: Tensor, compute: Compute) -> gemm.Problem:
    """C (+)= rows · Wᵀ or rows · W, W the source before the last. Of float32 with gaps or batches:
    a product with strides."""
    w, is_rounded = node.src[-2], "rounds_w" in node.params
    if w.dtype is F32 and not (is_rounded or (_lies_in_rows(w) and rows.is_contiguous)):
        b = matrices_of(w) if form == "mul_mat" else transposed_matrices(w)
        return strided_problem(node.shape, matrices_of(rows), b)
    return weight_problem(form, node, rows, compute)


def weight_problem(
    form: gemm.Form, node: Tensor, rows: Tensor, compute: Compute, rank: int = 0
) -> gemm.Problem:
    """That of rows without gaps, or columns. Of a weight with several matrices: the product with
    each.

    rank: R of a product of low rank that is added beside it
    """
    w, (*m, k) = node.src[-2], rows.shape
    if len(w.shape) > 2:
        m = [m[-2] // w.shape[-3], m[-1]]
    in_columns, n = not rows.is_contiguous, node.shape[-1]
    return gemm.Problem(
        form, prod(m), n, k, w.dtype, compute, a_in_columns=in_columns, rank=rank,
        a_is_narrow=rows.dtype is BF16, rounds_w="rounds_w" in node.params,
    )  # fmt: skip


def _lies_in_rows(w: Tensor) -> bool:
    """Whether w is a matrix whose rows have no gaps, so that they can be read one by one."""
    return len(w.shape) == 2 and w.strides[1] == w.dtype.block_bytes


def packing_of(node: Tensor, compute: Compute) -> tuple[int, str]:
    """(bytes, key) of x's packing: products rows · Wᵀ of the same x and key share it."""
    w, x = node.src[-2:]
    return gemm.packing(problem_of("mul_mat", node, x, compute)) if len(w.shape) == 2 else (0, "")


def bind(
    site: Site,
    p: gemm.Problem,
    rows: np.ndarray,
    form: gemm.Form,
    accumulate: gemm.Adds,
    beside: gemm.LowRank | None = None,
) -> Call:
    """The product p of a node in its memory, of rows (…, T, K) and the source before the last."""
    c, w, scratch = site.out, site.src[-2], site.scratch
    if p.form == "strided":
        b = w if form == "mul_mat" else w.swapaxes(-1, -2)
        return strided(p, c, rows, b, scratch, accumulate)
    packing = None
    if site.shared is not None:
        packing = gemm.Packing(site.shared, done=not site.fills_shared)
    parts = [(as_rows(c), as_rows(rows), w)] if w.ndim == 2 else by_matrix(c, rows, w)
    calls = [
        gemm.call_of(p, gemm.Operands(y, x, matrix, scratch, accumulate, packing, beside))
        for y, x, matrix in parts
    ]
    return calls[0] if len(calls) == 1 else Call(one_by_one, calls)
