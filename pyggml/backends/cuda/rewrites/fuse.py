"""fuse: one node in place of those that a fusion names, wherever its kernel serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyggml.backends.cuda.runtime.fusion import Fusion, maker, replacements
from pyggml.backends.cuda.runtime.kernel import is_of
from pyggml.graph import Graph
from pyggml.graph.op import Memory, changed_by, has_kernel
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import graph_pass

if TYPE_CHECKING:
    from pyggml.backends.cuda.runtime.device import CudaBackend

_REACH = 12  # so many nodes before the last one, the first one is looked for


@graph_pass
def fuse(fusion: Fusion, graph: Graph, card: CudaBackend) -> Graph:
    """The graph with fused nodes; the same graph if nothing fits.

    Others may stand between the nodes of a fusion, if they need none of them that needs them, and
    change no memory that these touch.
    """
    names = {t.op.name for t in graph.nodes if t.op is not None}
    if not names.issuperset(fusion.ops):
        return graph
    new: dict[Tensor, Tensor] = {}
    taken: set[Tensor] = set()
    nodes = [t for t in graph.nodes if has_kernel(t)]
    for i, t in enumerate(nodes):
        if is_of(t, fusion.ops[-1]) and t not in taken:
            before = [node for node in nodes[max(i - _REACH, 0) : i] if node not in taken]
            chain = _chain(fusion.ops, before, t)
            is_read = [_is_read(node, chain, graph) for node in chain]
            computes = bool(chain) and all(card.refusal(node) is None for node in chain)
            if computes and _fits(chain, graph) and fusion.serves(chain, is_read, card.compute):
                new |= replacements(fusion, chain, is_read)
                taken.update(chain)
    return rewrite(graph, new)


def _chain(ops: Sequence[str], before: Sequence[Tensor], last: Tensor) -> list[Tensor]:
    """The nodes of these ops that end with the last one; none if one is missing."""
    nodes, left = [last], iter(reversed(before))
    for name in reversed(ops[:-1]):
        t = next((t for t in left if is_of(t, name) and _is_linked(t, nodes)), None)
        if t is None:
            return []
        nodes.insert(0, t)
    return nodes


def _is_linked(t: Tensor, nodes: Sequence[Tensor]) -> bool:
    """Whether t gives its result to one of these nodes, or shares a source with it."""
    near = {t, *t.saved, *(s.root for s in t.src)}
    return any(s.root in near for node in nodes for s in node.src)


def _is_read(t: Tensor, nodes: Sequence[Tensor], graph: Graph) -> bool:
    """Whether a node outside the fusion, or the caller, reads the result."""
    is_last = t is nodes[-1] or t.base is not None
    outside = any(o.root is t for o in graph.outputs) or not graph.users[t] <= set(nodes)
    return is_last or outside


def _fits(nodes: Sequence[Tensor], graph: Graph) -> bool:
    """Whether the nodes can run at once."""
    changed = {root for t in nodes for root in changed_by(t)}
    ours = changed.union(s.root for t in nodes for s in t.src)
    for t in graph.nodes[graph.places[nodes[0]] : graph.places[nodes[-1]]]:
        touched = {s.root for s in t.src} & changed or ours.intersection(changed_by(t))
        if t not in nodes and has_kernel(t) and touched:
            return False
    of_leaves = all(t.op is None for t in changed)
    writes_are_views = all(t.op and t.op.memory is Memory.ALIAS for t in nodes if t.is_write)
    outside = (s for t in nodes for s in t.src if maker(s) not in nodes)
    return of_leaves and writes_are_views and not graph.needs(outside, nodes)
