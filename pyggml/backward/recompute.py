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
from pyggml.graph.verify import graph_pass


class Keep(Enum):
    """Which forward results stay in memory until the backward pass has read them."""

    ALL = "all that it reads"
    COSTLY = "what is not cheap to compute again: norms, activations and rotations are"
    LAYERS = (
        "some boundaries of layers; the layers behind each are computed again for their backward"
    )


@graph_pass
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
    if keep is Keep.COSTLY:
        return recomputable(graph) - irreplaceable(graph)
    inside, lasting = _inside_layers(graph), irreplaceable(graph)
    lasting -= _boundaries_made_again(graph, sum(t.n_bytes for t in _read_later(graph) - lasting))
    inside = (inside | {t.root for t in graph.notes.boundaries}) - lasting
    return recomputable(graph, inside) - lasting


def _boundaries_made_again(graph: Graph, n_bytes: int) -> set[Tensor]:
    """The owners of the boundaries that are not kept, but computed again with the layers around.

    The backward pass frees boundaries from the last one on. So it may hold what several layers
    keep, n_bytes of all together, where that takes no more than the boundaries freed before. Each
    costs a product more, so that it is one in four at most: eight of 28 took 1.6 % of a step's time
    with a model of 0.6B.
    """
    boundaries = sorted(graph.notes.boundaries, key=lambda t: graph.places.get(t, -1))[1:]
    dropped, freed = set[Tensor](), 0
    while boundaries:
        freed += boundaries.pop().n_bytes
        n = freed * len(graph.notes.boundaries) // max(n_bytes, 1)
        for t in boundaries[len(boundaries) - n :] if n else ():
            if 4 * len(dropped) < len(graph.notes.boundaries) - 4:
                dropped.add(t.root)
                boundaries.remove(t)
    return dropped


def _read_later(graph: Graph) -> set[Tensor]:
    """The forward results that the backward pass reads."""
    forward, backward = forward_and_backward(graph)
    return {t.root for t in forward} & {s.root for t in backward for s in t.src}


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
