"""Gradients that are added to the batches' sum where they are gradient, on the CPU.

A gradient of its own would be written, read again and added: three times the bytes of a matrix, and
the memory of the largest. Threads need not meet once more for it, either. A sum begins as 0, so the
bits are the same; where zeros are written for it, the gradient is written instead.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from pyggml.graph.dtypes import F32
from pyggml.graph.op import Op, Spec, over_first
from pyggml.graph.pattern import Match, Pattern
from pyggml.graph.rewrite import Replacements
from pyggml.graph.table import Rewrite
from pyggml.graph.tensor import Tensor
from pyggml.kernels.kernel import KERNELS
from pyggml.ops.in_bf16 import NO_GRAD
from pyggml.ops.layout.rows import GET_ROWS_BACK, GET_ROWS_BACK_ADD
from pyggml.ops.product.matmul import OUT_PROD, OUT_PROD_ADD


def _anew(adding: Op, plain: Op) -> Op:
    """The plain op in the memory of a first source, whose numbers it does not read."""

    def spec(*src: Tensor, anew: bool, **params: Any) -> Spec:
        return adding.spec(*src, **params)

    def ref(_: np.ndarray, *arrays: np.ndarray, anew: bool, **params: Any) -> np.ndarray:
        return plain.ref(*arrays, **params)

    op = replace(adding, spec=spec, ref=ref, grad=NO_GRAD)
    KERNELS[op] = KERNELS[plain]
    return op


_ADDING = {OUT_PROD: OUT_PROD_ADD, GET_ROWS_BACK: GET_ROWS_BACK_ADD}
_ANEW = {plain: _anew(adding, plain) for plain, adding in _ADDING.items()}


def _is_sum(m: Match) -> bool:
    """Whether a leaf's memory is the sum, which begins as 0, of matrices as they are made."""
    zeros = m.get("zeros")
    is_begun = zeros is None or (zeros.is_write and zeros.params["value"] == 0)
    is_alike = (m.gradient.dtype, m.gradient.shape) == (F32, m.total.shape)
    return is_begun and is_alike and m.total.is_write


def _onto(m: Match, gradient: Tensor) -> Tensor:
    """What makes a gradient and adds it to the sum, or writes it there."""
    assert gradient.op is not None
    if m.get("zeros") is None:
        return over_first(_ADDING[gradient.op](m.sum, *gradient.src, **gradient.params))
    return over_first(_ANEW[gradient.op](m.sum, *gradient.src, anew=True, **gradient.params))


def _both(m: Match) -> Replacements:
    """The product where it stands, then the rows."""
    total = GET_ROWS_BACK_ADD(m.product, *m.back.src, **m.back.params)
    total.base, total.offset = m.sum.root, m.sum.offset
    return {m.product: _onto(m, m.product), m.total: total, **_zeros(m)}


def _zeros(m: Match) -> Replacements:
    """Zeros that nobody reads any more are not written."""
    return {} if m.get("zeros") is None else {m.zeros: m.sum}


# Of an embedding that is the output matrix, too; and any other.
_OF_BOTH = "product = out_prod(a, b); back = get_rows_back(dy, ids); gradient = add(product, back)"
_OF_ONE = "gradient = (out_prod | get_rows_back)(*factors)"
ONTO_SUMS = tuple(
    Rewrite(Pattern(f"{gradient}; {total}"), _is_sum, becomes)
    for total in ("zeros = fill(sum); total = add(zeros, gradient)", "total = add(sum, gradient)")
    for gradient, becomes in (
        (_OF_BOTH, _both),
        (_OF_ONE, lambda m: {m.total: _onto(m, m.gradient), **_zeros(m)}),
    )
)
