"""Gradients are added to their accumulators as they are made."""

from collections.abc import Mapping

from pyggml.backends.cuda.ops.layout.rows import GET_ROWS_BACK_ADDED
from pyggml.backends.cuda.ops.lora.nodes import (
    GRADIENT_OF_A,
    GRADIENT_OF_A_ADD,
    GRADIENT_OF_B,
    GRADIENT_OF_B_ADD,
    add_op,
)
from pyggml.graph.dtypes import F32
from pyggml.graph.op import Op, over_first
from pyggml.graph.pattern import Match, Pattern
from pyggml.graph.rewrite import Replacements
from pyggml.graph.table import Rewrite
from pyggml.ops.in_bf16 import bf16_op
from pyggml.ops.layout.rows import GET_ROWS_BACK
from pyggml.ops.product.matmul import OUT_PROD, OUT_PROD_ADD

OUT_PROD_OF_BF16 = bf16_op(OUT_PROD, (1,), ())  # both of whose factors are BF16
GET_ROWS_BACK_ADD = add_op(GET_ROWS_BACK, GET_ROWS_BACK_ADDED)
_ADDING: Mapping[str, Op] = {
    OUT_PROD.name: OUT_PROD_ADD,
    GRADIENT_OF_A.name: GRADIENT_OF_A_ADD,
    GRADIENT_OF_B.name: GRADIENT_OF_B_ADD,
}


def _at_once(m: Match) -> Replacements:
    op, src = m.product.op, m.product.src
    assert op is not None
    add = _ADDING[op.name]
    if op is OUT_PROD_OF_BF16:
        add = bf16_op(add, (len(src),), ())
    return {m.total: over_first(add(m.so_far, *src, **m.product.params))}


def _is_plain(m: Match) -> bool:
    alike = all(t.shape == m.total.shape and t.dtype is F32 for t in (m.x, m.back))
    return alike and not m.total.is_write and m.x.is_contiguous


# The gradient of an embedding that serves as the output matrix too.
SUM_OF_ROWS = Rewrite(
    Pattern("back = get_rows_back(dy, ids); total = add(x, back)"),
    _is_plain,
    lambda m: {m.total: GET_ROWS_BACK_ADD(m.x, *m.back.src, **m.back.params)},
)
SUM = Rewrite(
    Pattern("""
        product = (out_prod | gradient_of_a | gradient_of_b)(*factors)
        total = add(so_far, product)
    """),
    lambda m: m.total.is_write and m.so_far.shape == m.product.shape and m.product.dtype is F32,
    _at_once,
)
