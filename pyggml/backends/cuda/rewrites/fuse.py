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
    return rewrite(graph, _Matcher(fusion, graph, card).replacements())


class _Matcher:
    def __init__(self, fusion: Fusion, graph: Graph, card: CudaBackend) -> None:
        self._fusion, self._card = fusion, card
        self._nodes = [t for t in graph.nodes if has_kernel(t)]
        self._number = {t: i for i, t in enumerate(graph.nodes)}
        self._outputs = {t.root for t in graph.outputs}
        self._readers: dict[Tensor, set[Tensor]] = {}  # of an owner's memory
        for t in self._nodes:
            for s in t.src:
                self._readers.setdefault(s.root, set()).add(t)
        self._taken: set[Tensor] = set()

    def replacements(self) -> dict[Tensor, Tensor]:
        new: dict[Tensor, Tensor] = {}
        for i, t in enumerate(self._nodes):
            if is_of(t, self._fusion.ops[-1]) and t not in self._taken:
                nodes = self._chain(i)
                is_read = [self._is_read(t, nodes) for t in nodes]
                if nodes and self._fits(nodes) and self._serves(nodes, is_read):
                    new |= replacements(self._fusion, nodes, is_read)
                    self._taken.update(nodes)
        return new

    def _chain(self, last: int) -> list[Tensor]:
        """The nodes of the fusion that end with this one; none if one is missing."""
        first, nodes = last, [self._nodes[last]]
        for name in reversed(self._fusion.ops[:-1]):
            for i in range(first - 1, max(last - _REACH, 0) - 1, -1):
                t = self._nodes[i]
                if is_of(t, name) and t not in self._taken and _is_linked(t, nodes):
                    first = i
                    nodes.insert(0, t)
                    break
            else:
                return []
        return nodes

    def _is_read(self, t: Tensor, nodes: Sequence[Tensor]) -> bool:
        """Whether a node outside the fusion, or the caller, reads the result."""
        is_last = t is nodes[-1] or t in self._outputs or t.base is not None
        return is_last or not self._readers.get(t, set()) <= set(nodes)

    def _serves(self, nodes: Sequence[Tensor], is_read: Sequence[bool]) -> bool:
        known = all(self._card.refusal(t) is None for t in nodes)
        return known and self._fusion.serves(nodes, is_read, self._card.compute)

    def _fits(self, nodes: Sequence[Tensor]) -> bool:
        """Whether the nodes can run at once."""
        changed = {root for t in nodes for root in changed_by(t)}
        ours = changed.union(s.root for t in nodes for s in t.src)
        first, last = (self._nodes.index(t) for t in (nodes[0], nodes[-1]))
        for t in self._nodes[first:last]:
            touched = {s.root for s in t.src} & changed or ours.intersection(changed_by(t))
            if t not in nodes and touched:
                return False
        of_leaves = all(t.op is None for t in changed)
        known = all(t.op and t.op.memory is Memory.ALIAS for t in nodes if t.is_write)
        return of_leaves and known and not self._is_between(nodes)

    def _is_between(self, nodes: Sequence[Tensor]) -> bool:
        """Whether another node needs one of these, and one of these needs it."""
        first = self._number[nodes[0]]
        stack = [s for t in nodes for s in t.src if maker(s) not in nodes]
        seen = set(stack)
        while stack:
            t = stack.pop()
            if t in nodes:
                return True
            late = [s for s in t.src if self._number.get(s, -1) >= first and s not in seen]
            seen.update(late)
            stack += late
        return False


def _is_linked(t: Tensor, nodes: Sequence[Tensor]) -> bool:
    """Whether t gives its result to one of these nodes, or shares a source with it."""
    near = {t, *t.saved, *(s.root for s in t.src)}
    return any(s.root in near for node in nodes for s in node.src)
