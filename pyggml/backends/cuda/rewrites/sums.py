"""Gradients are added to their accumulators as they are made."""

from collections.abc import Mapping

from pyggml.backends.cuda.ops.lora.nodes import (
    GRADIENT_OF_A,
    GRADIENT_OF_A_ADD,
    GRADIENT_OF_B,
    GRADIENT_OF_B_ADD,
)
from pyggml.graph.op import Op, over_first
from pyggml.graph.pattern import Match, Pattern
from pyggml.graph.rewrite import Replacements
from pyggml.graph.table import Rewrite
from pyggml.ops.product.matmul import OUT_PROD, OUT_PROD_ADD

_ADDING: Mapping[Op, Op] = {
    OUT_PROD: OUT_PROD_ADD,
    GRADIENT_OF_A: GRADIENT_OF_A_ADD,
    GRADIENT_OF_B: GRADIENT_OF_B_ADD,
}


def _lies_in_leaf(m: Match) -> bool:
    return m.total.is_write and m.so_far.shape == m.product.shape and m.product.op in _ADDING


def _at_once(m: Match) -> Replacements:
    assert m.product.op is not None
    add = _ADDING[m.product.op]
    return {m.total: over_first(add(m.so_far, *m.product.src, **m.product.params))}


SUM = Rewrite(
    Pattern("""
        product = (out_prod | gradient_of_a | gradient_of_b)(*factors)
        total = add(so_far, product)
    """),
    _lies_in_leaf,
    _at_once,
)
