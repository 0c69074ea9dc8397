"""Gradients that are added to the batches' sum where they are made, on the CPU.

A gradient of its own would be written, read again and added: three times the bytes of a matrix, and
the memory of the largest. Threads need not meet once more for it, either. A sum begins as 0, so the
bits of the first gradient are the same.
"""

from pyggml.graph.dtypes import F32
from pyggml.graph.op import over_first
from pyggml.graph.pattern import Match, Pattern
from pyggml.graph.rewrite import Replacements
from pyggml.graph.table import Rewrite
from pyggml.graph.tensor import Tensor
from pyggml.ops.layout.rows import GET_ROWS_BACK, GET_ROWS_BACK_ADD
from pyggml.ops.product.matmul import OUT_PROD, OUT_PROD_ADD

_ADDING = {OUT_PROD: OUT_PROD_ADD, GET_ROWS_BACK: GET_ROWS_BACK_ADD}


def _is_sum(m: Match) -> bool:
    """Whether a leaf's memory is the sum, of matrices as they are made."""
    return m.total.is_write and (m.gradient.dtype, m.gradient.shape) == (F32, m.total.shape)


def _onto(m: Match, gradient: Tensor) -> Tensor:
    """What makes a gradient and adds it to the sum."""
    assert gradient.op is not None
    return over_first(_ADDING[gradient.op](m.sum, *gradient.src, **gradient.params))


def _both(m: Match) -> Replacements:
    """The product where it stands, then the rows."""
    total = GET_ROWS_BACK_ADD(m.product, *m.back.src, **m.back.params)
    total.base, total.offset = m.sum.root, m.sum.offset
    return {m.product: _onto(m, m.product), m.total: total}


def _of_one(name: str) -> Rewrite:
    """What adds the gradients of one op to their sum."""
    pattern = Pattern(f"gradient = {name}(*factors); {_TOTAL}")
    return Rewrite(pattern, _is_sum, lambda m: {m.total: _onto(m, m.gradient)})


_TOTAL = "total = add(sum, gradient)"
# Of an embedding that is the output matrix, too.
_OF_BOTH = "product = out_prod(a, b); back = get_rows_back(dy, ids); gradient = add(product, back)"
PRODUCT_ONTO_SUM = _of_one("out_prod")
ONTO_SUMS = (
    Rewrite(Pattern(f"{_OF_BOTH}; {_TOTAL}"), _is_sum, _both),
    PRODUCT_ONTO_SUM,
    _of_one("get_rows_back"),
)
