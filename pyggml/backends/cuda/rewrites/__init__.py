"""Passes over a graph that a card runs alone, in their order.

LoRA's come first, as they change what the nodes are; then fusions, the longest first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pyggml.backends.cuda.gemm.cublas import has_cublas
from pyggml.backends.cuda.ops.generation.experts import EXPERTS_GATED, EXPERTS_SUM, EXPERTS_WEIGHTED
from pyggml.backends.cuda.ops.generation.heads import ATTENDED_HEADS, HEADS
from pyggml.backends.cuda.ops.generation.next_token import LIKELIEST_ADVANCE
from pyggml.backends.cuda.ops.generation.products import (
    NORM_GATED,
    NORM_PRODUCT,
    NORM_PRODUCTS,
    PRODUCT_ADD,
)
from pyggml.backends.cuda.ops.generation.router import EXPERTS_NORM_ROUTER, EXPERTS_ROUTER
from pyggml.backends.cuda.ops.glu import SWIGLU_BACKS, SWIGLU_BACKS_AND_UNIT
from pyggml.backends.cuda.ops.lora.gated_sums import GATED_SUMS
from pyggml.backends.cuda.ops.lora.norm_rows import (
    NORM_AGAIN_GRADIENT,
    NORM_GRADIENT,
    NORM_ROWS,
)
from pyggml.backends.cuda.ops.lora.thin_sums import with_thin_sums
from pyggml.backends.cuda.ops.loss.losses import CROSS_ENTROPY_BOTH
from pyggml.backends.cuda.ops.norm.norm_mul import (
    ADD_COPY_NORM,
    ADD_NORM,
    NORM_AGAIN_BACK_ADD,
    NORM_BACK_ADD,
    NORM_BACKS,
    NORM_BACKS_ADD,
)
from pyggml.backends.cuda.ops.norm.norm_rope import (
    NORM_ROPE,
    ROPE_BACK_NORM_BACK,
    ROPE_BACK_NORM_BACKS,
)
from pyggml.backends.cuda.ops.products import OUT_PROD_SCALED, PRODUCT_SCALED
from pyggml.backends.cuda.rewrites.expert_units import EXPERT_UNITS
from pyggml.backends.cuda.rewrites.formulas import FORMULA
from pyggml.backends.cuda.rewrites.gated_gradients import GATED, with_kept_ups
from pyggml.backends.cuda.rewrites.joined_backs import with_joined_backs
from pyggml.backends.cuda.rewrites.narrow import narrow
from pyggml.backends.cuda.rewrites.sums import SUM, SUM_OF_ROWS
from pyggml.backends.cuda.rewrites.unpacked import with_shared_copies, with_unpacked_weights
from pyggml.backends.cuda.rewrites.wide_products import with_wide_products
from pyggml.backends.cuda.runtime.fusion import rewrites
from pyggml.graph import Graph
from pyggml.graph.table import by_table

if TYPE_CHECKING:
    from pyggml.backends.cuda.runtime.device import CudaBackend


FUSIONS = (
    GATED_SUMS,
    NORM_ROWS,
    NORM_AGAIN_GRADIENT,
    NORM_GRADIENT,
    ATTENDED_HEADS,
    HEADS,
    EXPERTS_NORM_ROUTER,
    NORM_GATED,
    NORM_PRODUCTS,
    ADD_COPY_NORM,
    ROPE_BACK_NORM_BACKS,
    ROPE_BACK_NORM_BACK,
    NORM_ROPE,
    NORM_PRODUCT,
    PRODUCT_ADD,
    ADD_NORM,
    NORM_BACKS_ADD,
    NORM_BACKS,
    NORM_AGAIN_BACK_ADD,
    NORM_BACK_ADD,
    CROSS_ENTROPY_BOTH,
    SWIGLU_BACKS_AND_UNIT,
    SWIGLU_BACKS,
    PRODUCT_SCALED,
    OUT_PROD_SCALED,
    LIKELIEST_ADVANCE,
    EXPERTS_WEIGHTED,
    EXPERTS_GATED,
    EXPERTS_ROUTER,
    EXPERTS_SUM,
)
LORA: tuple[Callable[[Graph], Graph], ...] = (
    with_wide_products,
    partial(by_table, table=[GATED]),
    partial(by_table, table=EXPERT_UNITS),
    partial(by_table, table=[FORMULA]),
    with_joined_backs,
    narrow,
)


def rewritten(graph: Graph, card: CudaBackend) -> Graph:
    """The graph as this card computes it."""
    if card.compute == "bf16" and has_cublas():
        for change in LORA:
            graph = change(graph)
        graph = with_kept_ups(graph, card)  # or what computes them again reads norms early
    fusions = [*rewrites(FUSIONS, card)]  # of which the first has sums of its own
    graph = by_table(graph, [*fusions[:1], SUM_OF_ROWS, SUM, *fusions[1:]])
    graph = with_shared_copies(with_thin_sums(graph), card)
    return with_unpacked_weights(graph, card)
