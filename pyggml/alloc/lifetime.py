"""The lifetime of each piece of memory: its first and its last node."""

from typing import NamedTuple

from pyggml.graph import Graph
from pyggml.graph.op import SAVED, Memory
from pyggml.graph.tensor import Tensor

FOREVER = 1 << 60


class Lifetime(NamedTuple):
    """Indices into graph.nodes: written at `first`, read until `last` (FOREVER for outputs)."""

    first: int
    last: int


def lifetimes(graph: Graph) -> dict[Tensor, Lifetime]:
    """The lifetime of every node that owns memory: of no view and no alias. A use of a view counts
    as a use of its owner.

    A saved tensor without readers is not in graph.nodes, but it is written all the same: it lives
    for the one node that writes it.
    """
    first: dict[Tensor, int] = {}
    last: dict[Tensor, int] = {}
    for i, t in enumerate(graph.nodes):
        if t.base is None:
            born = graph.places[t.src[0]] if t.op is SAVED else i
            first[t] = born
            last[t] = max(last.get(t, i), i)
        if t.op is not SAVED:  # written together with its source, so it does not prolong it
            for s in t.src:
                last[s.root] = i
        for s in t.saved:
            first.setdefault(s, i)
            last.setdefault(s, i)
    for t in graph.outputs:
        last[t.root] = FOREVER
    return {t: Lifetime(first[t], last[t]) for t in first}


def reusable_source(node: Tensor, i: int, lives: dict[Tensor, Lifetime]) -> Tensor | None:
    """The owner whose memory node i may overwrite with its own result, or None.

    The owner's life must end here. One source of node i must show all of it, in the node's own type
    and size. If the op can overwrite only its first source, no other source may show the owner;
    else other sources may show it only whole, through the same window.
    """
    assert node.op is not None
    if node.op.memory not in (Memory.INPLACE, Memory.INPLACE_FIRST):
        return None
    first_only = node.op.memory is Memory.INPLACE_FIRST
    for s in node.src[:1] if first_only else node.src:
        owner = s.root
        if owner not in lives or lives[owner].last != i:
            continue
        fits = (s.dtype, s.shape) == (node.dtype, node.shape) and s.n_bytes == owner.n_bytes
        if not fits or not s.is_contiguous:
            continue
        seen = [(o.offset, o.shape, o.strides) for o in node.src if o.root is owner]
        if len(seen if first_only else set(seen)) == 1:
            return owner
    return None
