"""Gradients that are added to the batches' sum where they are made, on the CPU.

A gradient of its own would be written, read again and added: three times the bytes of a matrix, and
the memory of the largest. Threads need not meet once more for it, either. A sum begins as 0, so the
bits of the first gradient are the same. Where `accumulate` says that a sum begins, the gradient is
written over what is there: neither zeros are written nor anything is read. The bits are the same
but for the sign of a zero: 0 + -0 is 0.
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
from pyggml.ops.optim import ACCUMULATE
from pyggml.ops.product.matmul import OUT_PROD, OUT_PROD_ADD


def _accumulating(adding: Op) -> Op:
    """The op with `keeps` as its second source: where that is 0, its first counts as 0."""

    def spec(total: Tensor, _: Tensor, *src: Tensor, **params: Any) -> Spec:
        return adding.spec(total, *src, **params)

    def ref(total: np.ndarray, keeps: np.ndarray, *src: np.ndarray, **params: Any) -> np.ndarray:
        return adding.ref(np.where(keeps, total, 0), *src, **params)

    op = replace(adding, spec=spec, ref=ref, grad=NO_GRAD)
    KERNELS[op] = KERNELS[adding]
    return op


_ADDING = {OUT_PROD: OUT_PROD_ADD, GET_ROWS_BACK: GET_ROWS_BACK_ADD}
_ACCUMULATING = {op: _accumulating(adding) for op, adding in _ADDING.items()}


def _is_sum(m: Match) -> bool:
    """Whether a leaf's memory is the sum, of matrices as they are made."""
    return m.total.is_write and (m.gradient.dtype, m.gradient.shape) == (F32, m.total.shape)


def _onto(m: Match, gradient: Tensor) -> Tensor:
    """What makes a gradient and adds it to the sum, or begins one."""
    assert gradient.op is not None
    total, _, *keeps = m.total.src
    ops = _ACCUMULATING if m.total.op is ACCUMULATE else _ADDING
    return over_first(ops[gradient.op](total, *keeps, *gradient.src, **gradient.params))


def _both(m: Match) -> Replacements:
    """The product where it stands, then the rows."""
    total = GET_ROWS_BACK_ADD(m.product, *m.back.src, **m.back.params)
    total.base, total.offset = m.sum.root, m.sum.offset
    return {m.product: _onto(m, m.product), m.total: total}


def _of_one(name: str, total: str) -> Rewrite:
    """What adds the gradients of one op to their sum."""
    pattern = Pattern(f"gradient = {name}(*factors); {total}")
    return Rewrite(pattern, _is_sum, lambda m: {m.total: _onto(m, m.gradient)})


_ADDED = "total = add(sum, gradient)"
_TOTAL = f"{_ADDED} or accumulate(sum, gradient, keeps)"
# Of an embedding that is the output matrix, too.
_OF_BOTH = "product = out_prod(a, b); back = get_rows_back(dy, ids); gradient = add(product, back)"
PRODUCT_ONTO_SUM = _of_one("out_prod", _ADDED)
ONTO_SUMS = (
    Rewrite(Pattern(f"{_OF_BOTH}; {_TOTAL}"), _is_sum, _both),
    _of_one("out_prod", _TOTAL),
    _of_one("get_rows_back", _TOTAL),
)
