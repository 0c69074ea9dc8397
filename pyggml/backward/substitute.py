"""Substitutes: the common part of the passes over a finished backward graph.

Forward nodes stay as they are. Some backward nodes get other sources. Nodes are immutable, so such
a backward node is replaced by a new one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from pyggml.graph import Graph
from pyggml.graph.op import SAVED
from pyggml.graph.tensor import Tensor


def forward_and_backward(graph: Graph) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(Forward nodes, backward nodes). The loss is the last forward node."""
    loss = graph.outputs[0]
    n_forward = graph.nodes.index(loss) + 1 if loss.op is not None else 0
    return graph.nodes[:n_forward], graph.nodes[n_forward:]


def pinned(graph: Graph) -> set[Tensor]:
    """Owners that no pass may replace: the loss, the boundaries of layers, memory that a forward
    node changes, and the results of nodes that read such memory."""
    forward, _ = forward_and_backward(graph)
    changed = {t.root for t in forward if t.is_write}
    around = {t.root for t in forward if any(s.root in changed for s in t.src)}
    return {graph.outputs[0].root} | changed | around | {t.root for t in graph.notes.boundaries}


def cheap(graph: Graph, again: Iterable[Tensor] = ()) -> set[Tensor]:
    """The owners `again`, and all forward owners that cheap ops can compute again.

    The backward pass has the sources of such an op: each is a leaf, is read by a backward node, is
    in `again`, or is cheap itself.
    """
    forward, backward = forward_and_backward(graph)
    read = {s.root for t in backward if t.op is not SAVED for s in t.src}
    found = set(again)
    for t in forward:
        there = (s.root.op is None or s.root in read or s.root in found for s in t.src)
        if t.base is None and t.op is not None and t.op.cheap and all(there):
            found.add(t)
    return found


class Substitutes:
    """Replacements, for backward nodes, of the forward owners `replaced`.

    A substitute is the same op once more, on the substitutes of its sources. `given` holds
    substitutes that exist already.
    """

    def __init__(
        self, graph: Graph, replaced: Set[Tensor], given: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        self._graph, self._replaced = graph, replaced
        self._number = {t: i for i, t in enumerate(graph.nodes)}
        self._found = dict(given or {})
        self._steps: list[Tensor] = []
        self._smaller = defaultdict[Tensor, list[Tensor]](list)
        for t in forward_and_backward(graph)[0]:
            if t in replaced and len(t.src) == 1 and t.n_bytes < t.src[0].n_bytes:
                self._smaller[t.src[0]].append(t)

    def apply(self, forward: Sequence[Tensor]) -> Graph:
        """The graph of these forward nodes, with backward nodes that read substitutes.

        A substitute stands right before its first reader. One exception saves memory: if it is
        smaller than its only source, it follows the source at once, whose memory may then be free.
        """
        for t in forward_and_backward(self._graph)[1]:
            if t.op is not SAVED:
                for s in t.src:
                    self._make(s)
                self._renew(t)
        outputs = (self._found.get(t, t) for t in self._graph.outputs)
        return Graph.of(*outputs, steps=(*forward, *self._steps)).noted(self._graph.notes)

    def _make(self, wanted: Tensor) -> None:
        """Add the substitute of `wanted`, if there is to be one, and of its sources."""
        for t in self._missing(wanted):
            if t not in self._found:
                self._renew(t)
            for small in self._smaller.get(t, ()):
                if small not in self._found:
                    self._renew(small)

    def _renew(self, t: Tensor) -> None:
        """Add t to the steps, or a new node in its place if its sources have substitutes."""
        src = tuple(self._found.get(s, s) for s in t.src)
        new = t
        if src != t.src or t.root in self._replaced:
            new = self._found[t] = t.reading(src)
            self._found |= zip(t.saved, new.saved, strict=True)
        self._steps.append(new)

    def _missing(self, wanted: Tensor) -> Iterator[Tensor]:
        """The forward nodes to compute again for `wanted`, sources before users."""
        needed, stack = set[Tensor](), [wanted]
        while stack:
            t = stack.pop()
            if t not in needed and t not in self._found and self._is_replaced(t):
                needed.add(t)
                stack.extend(t.src)
        return (t for t in sorted(needed, key=self._number.__getitem__) if t.op is not SAVED)

    def _is_replaced(self, t: Tensor) -> bool:
        maker = t.src[0] if t.op is SAVED else t
        return t.op is not None and maker.root in self._replaced
