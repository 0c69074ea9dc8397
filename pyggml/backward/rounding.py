"""What a training pass rounds, beside what products do.

Its attention may round as its backward pass does, which needs the probabilities of the same scores.

Large tensors inside a layer are kept for the backward pass as rounded copies.

Each copy is made right after its tensor, whose memory is then free after its last use in the
forward pass. The backward pass widens the copy to float32 and reads that. Results of cheap ops on
large tensors are not kept: they are computed again, from the widened copies.
"""

from pyggml.backward.substitute import (
    forward_and_backward,
    irreplaceable,
    recomputable,
    with_substitutes,
)
from pyggml.graph import Graph
from pyggml.graph.dtypes import F32, DType
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import graph_pass
from pyggml.ops import cpy
from pyggml.ops.attention.attention import FLASH_ATTN_EXT, may_round


@graph_pass
def round_attention(graph: Graph) -> Graph:
    """The graph, all of whose attention may round. `graph` comes from build_backward."""
    forward, _ = forward_and_backward(graph)
    return rewrite(graph, {t: may_round(t) for t in forward if t.op is FLASH_ATTN_EXT})


@graph_pass
def round_large(graph: Graph, kept_as: DType) -> Graph:
    """The graph, with its large tensors (graph.notes) kept as `kept_as`: F32 or BF16.

    `graph` comes from build_backward. The loss is unchanged; the gradients include the rounding.
    """
    if kept_as is F32:
        return graph
    forward, _ = forward_and_backward(graph)
    large = graph.notes.large - irreplaceable(graph)
    copies = {t: cpy(t, kept_as) for t in forward if t in large}
    wide = {t: cpy(copy, F32).named(t.name) for t, copy in copies.items()}
    with_copies = [x for t in forward for x in (t, copies.get(t)) if x is not None]
    return with_substitutes(graph, _large_and_made_of(large, graph), with_copies, wide)


def _large_and_made_of(large: frozenset[Tensor], graph: Graph) -> set[Tensor]:
    """Large owners, and the results of cheap ops on them."""
    forward, _ = forward_and_backward(graph)
    again = recomputable(graph) - irreplaceable(graph)
    owners: set[Tensor] = set()
    for t in forward:
        if t in large or (t in again and any(s.root in owners for s in t.src)):
            owners.add(t)
    return owners
