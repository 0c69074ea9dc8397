"""Rematerialisation: the backward pass computes some forward results again instead of keeping them.

The same op runs on the same numbers, right before the first backward node that reads its result.
Its sources, in turn, are either kept or computed again. Gradients are therefore bitwise the same;
only memory and time change.
"""

from enum import Enum

from pyggml.backward.substitute import (
    forward_and_backward,
    irreplaceable,
    recomputable,
    with_substitutes,
)
from pyggml.graph import Graph
from pyggml.graph.tensor import Tensor


class Keep(Enum):
    """Which forward results stay in memory until the backward pass has read them."""

    ALL = "all that it reads"
    COSTLY = "what is not cheap to compute again: norms, activations and rotations are"
    LAYERS = "the boundaries of layers; a layer is computed again when its backward pass begins"


def rematerialise(graph: Graph, keep: Keep) -> Graph:
    """The graph, from build_backward, with no more forward results kept than `keep` says.

    Loss and gradients are bitwise the same. Boundaries of layers are in graph.notes.
    """
    again = made_again(graph, keep)
    return with_substitutes(graph, again, forward_and_backward(graph)[0]) if again else graph


def made_again(graph: Graph, keep: Keep) -> set[Tensor]:
    """The forward owners that are computed again."""
    if keep is Keep.ALL:
        return set()
    inside = _inside_layers(graph) if keep is Keep.LAYERS else set()
    lasting = irreplaceable(graph)
    return recomputable(graph, inside - lasting) - lasting


def _inside_layers(graph: Graph) -> set[Tensor]:
    """Owners on a path from one boundary to another."""
    order, boundaries = forward_and_backward(graph)[0], graph.notes.boundaries
    behind: set[Tensor] = set()
    for t in order:
        if any(s in boundaries or s in behind for s in t.src):
            behind.add(t)
    before: set[Tensor] = set()
    for t in reversed(order):
        if t in boundaries or t in before:
            before.update(t.src)
    return {t for t in behind & before if t.base is None}
