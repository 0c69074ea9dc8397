"""What the backward pass computes again instead of finding it in memory.

What is not kept is made again by the same op on the same numbers, right before the backward node
that reads it first; what this reads is kept or made again in turn. The bits are the same, so
gradients do not depend on what is kept; only memory and time do.
"""

from __future__ import annotations

from enum import Enum

from pyggml.backward.substitute import Substitutes, cheap, parted, pinned
from pyggml.graph import Graph
from pyggml.tensor import Tensor


class Keep(Enum):
    """Which results of the forward pass stay in memory until the backward pass has read them."""

    ALL = "all that it reads"
    COSTLY = "what is not cheap to compute again: norms, activations and rotations are"
    LAYERS = "the boundaries of layers; a layer is computed again when its backward pass begins"


def rematerialise(graph: Graph, keep: Keep) -> Graph:
    """A graph of build_backward that keeps no more of its forward nodes than `keep` says; the
    boundaries of layers are in graph.notes. Loss and gradients have the same bits."""
    again = dropped(graph, keep)
    return Substitutes(graph, again).apply(parted(graph)[0]) if again else graph


def dropped(graph: Graph, keep: Keep) -> set[Tensor]:
    """The forward owners that `keep` does not keep."""
    if keep is Keep.ALL:
        return set()
    inside = _inside_layers(graph) if keep is Keep.LAYERS else set()
    kept = pinned(graph)
    return cheap(graph, inside - kept) - kept


def _inside_layers(graph: Graph) -> set[Tensor]:
    """Owners on a way from one boundary to another."""
    order, boundaries = parted(graph)[0], graph.notes.boundaries
    behind: set[Tensor] = set()
    for t in order:
        if any(s in boundaries or s in behind for s in t.src):
            behind.add(t)
    before: set[Tensor] = set()
    for t in reversed(order):
        if t in boundaries or t in before:
            before.update(t.src)
    return {t for t in behind & before if t.base is None}
