"""The backward pass reads what is large inside a layer from a rounded copy.

The copy is made right after the tensor itself, whose memory is then free as soon as the forward
pass has read it. Backward nodes read the copy, made float32 again; what they read that cheap ops
make of such tensors is made of it too.
"""

from __future__ import annotations

from pyggml.backward.substitute import Substitutes, cheap, parted, pinned
from pyggml.dtypes import F32, DType
from pyggml.graph import Graph
from pyggml.ops import cpy
from pyggml.tensor import Tensor


def round_large(graph: Graph, kept_as: DType) -> Graph:
    """A graph of build_backward whose large tensors (graph.notes) are kept as this type, F32 or
    BF16, between the two passes. The loss stays what it is, gradients bear the rounding."""
    if kept_as is F32:
        return graph
    forward, _ = parted(graph)
    large = graph.notes.large - pinned(graph)
    copies = {t: cpy(t, kept_as) for t in forward if t in large}
    wide = {t: cpy(copy, F32).named(t.name) for t, copy in copies.items()}
    with_copies = [x for t in forward for x in (t, copies.get(t)) if x is not None]
    return Substitutes(graph, _made_of(large, graph), wide).apply(with_copies)


def _made_of(large: frozenset[Tensor], graph: Graph) -> set[Tensor]:
    """Large owners, and what is cheap to make of those."""
    forward, _ = parted(graph)
    again = cheap(graph) - pinned(graph)
    found: set[Tensor] = set()
    for t in forward:
        if t in large or (t in again and any(s.root in found for s in t.src)):
            found.add(t)
    return found
