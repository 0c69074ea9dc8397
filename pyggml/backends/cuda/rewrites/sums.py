"""Gradients are added to their accumulators as they are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyggml.backends.cuda.ops.lora.nodes import (
    GRADIENT_OF_A,
    GRADIENT_OF_A_ADD,
    GRADIENT_OF_B,
    GRADIENT_OF_B_ADD,
)
from pyggml.graph import Graph
from pyggml.graph.op import Op, over_first
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import graph_pass
from pyggml.ops.arithmetic.arith import ADD
from pyggml.ops.product.matmul import OUT_PROD, OUT_PROD_ADD

if TYPE_CHECKING:
    from pyggml.backends.cuda.runtime.device import CudaBackend

_ADDING: Mapping[Op, Op] = {
    OUT_PROD: OUT_PROD_ADD,
    GRADIENT_OF_A: GRADIENT_OF_A_ADD,
    GRADIENT_OF_B: GRADIENT_OF_B_ADD,
}


@graph_pass
def with_sums(graph: Graph, card: CudaBackend) -> Graph:
    """The graph with one node for a product and its sum with what lies in a leaf."""
    return rewrite(graph, {t: _at_once(t) for t in graph.nodes if _is_sum(t, graph)})


def _is_sum(t: Tensor, graph: Graph) -> bool:
    if t.op is not ADD or not t.is_write:
        return False
    so_far, product = t.src
    alone = graph.is_only_for(product, t)
    return product.op in _ADDING and alone and so_far.shape == product.shape


def _at_once(t: Tensor) -> Tensor:
    so_far, product = t.src
    assert product.op is not None
    return over_first(_ADDING[product.op](so_far, *product.src, **product.params))
