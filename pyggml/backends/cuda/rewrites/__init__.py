"""Passes over a graph that a card runs alone, in their order.

LoRA's come first, as they change what the nodes are; then fusions, the longest first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pyggml.backends.cuda.gemm.cublas import has_cublas
from pyggml.backends.cuda.ops.few import NORM_GATED, NORM_PRODUCT, NORM_PRODUCTS, PRODUCT_ADD
from pyggml.backends.cuda.ops.few_experts import (
    EXPERTS_GATED,
    EXPERTS_SUM,
    EXPERTS_WEIGHTED,
)
from pyggml.backends.cuda.ops.glu import SWIGLU_BACKS
from pyggml.backends.cuda.ops.heads import ATTENDED_HEADS, HEADS
from pyggml.backends.cuda.ops.next_token import LIKELIEST_ADVANCE
from pyggml.backends.cuda.ops.norm_mul import ADD_COPY_NORM, ADD_NORM, NORM_BACK_ADD
from pyggml.backends.cuda.ops.norm_rope import NORM_ROPE, ROPE_BACK_NORM_BACK
from pyggml.backends.cuda.ops.products import OUT_PROD_SCALED, PRODUCT_SCALED
from pyggml.backends.cuda.ops.router import EXPERTS_NORM_ROUTER, EXPERTS_ROUTER
from pyggml.backends.cuda.rewrites.expert_units import with_expert_units
from pyggml.backends.cuda.rewrites.formulas import with_formulas
from pyggml.backends.cuda.rewrites.fuse import fuse
from pyggml.backends.cuda.rewrites.gated_gradients import with_gated_gradients
from pyggml.backends.cuda.rewrites.narrow import narrow
from pyggml.backends.cuda.rewrites.sums import with_sums
from pyggml.backends.cuda.rewrites.unpacked import with_unpacked_weights
from pyggml.backends.cuda.rewrites.wide_products import with_wide_products
from pyggml.graph import Graph

if TYPE_CHECKING:
    from pyggml.backends.cuda.runtime.device import CudaBackend


Rewrite = Callable[["Graph", "CudaBackend"], "Graph"]


def _rounding(change: Callable[[Graph], Graph]) -> Rewrite:
    """A pass for cards that round to bfloat16 and have cuBLAS."""

    def rewrite(graph: Graph, card: CudaBackend) -> Graph:
        return change(graph) if card.compute == "bf16" and has_cublas() else graph

    return rewrite


FUSIONS = (
    ATTENDED_HEADS,
    HEADS,
    EXPERTS_NORM_ROUTER,
    NORM_GATED,
    NORM_PRODUCTS,
    ADD_COPY_NORM,
    ROPE_BACK_NORM_BACK,
    NORM_ROPE,
    NORM_PRODUCT,
    PRODUCT_ADD,
    ADD_NORM,
    NORM_BACK_ADD,
    SWIGLU_BACKS,
    PRODUCT_SCALED,
    OUT_PROD_SCALED,
    LIKELIEST_ADVANCE,
    EXPERTS_WEIGHTED,
    EXPERTS_GATED,
    EXPERTS_ROUTER,
    EXPERTS_SUM,
)
LORA = with_wide_products, with_gated_gradients, with_expert_units, with_formulas, narrow
REWRITES: tuple[Rewrite, ...] = (
    *map(_rounding, LORA),
    with_sums,
    *(partial(fuse, fusion) for fusion in FUSIONS),
    with_unpacked_weights,
)


def rewritten(graph: Graph, card: CudaBackend) -> Graph:
    """The graph as this card computes it."""
    for rewrite in REWRITES:
        graph = rewrite(graph, card)
    return graph
