"""What the passes over a finished backward graph share.

Such a pass leaves forward nodes as they are and lets backward nodes read something else instead of
some of them. A node is never changed: where its sources change, a new one takes its place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from pyggml.graph import Graph
from pyggml.op import SAVED
from pyggml.tensor import Tensor


def parted(graph: Graph) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Forward nodes, of which the loss is the last, and backward nodes."""
    loss = graph.outputs[0]
    n_forward = graph.nodes.index(loss) + 1 if loss.op is not None else 0
    return graph.nodes[:n_forward], graph.nodes[n_forward:]


def pinned(graph: Graph) -> set[Tensor]:
    """Owners that no pass replaces: the loss, boundaries, what reads or writes memory that a
    forward node changes."""
    forward, _ = parted(graph)
    changed = {t.root for t in forward if t.is_write}
    around = {t.root for t in forward if any(s.root in changed for s in t.src)}
    return {graph.outputs[0].root} | changed | around | {t.root for t in graph.notes.boundaries}


def cheap(graph: Graph, again: Iterable[Tensor] = ()) -> set[Tensor]:
    """Forward owners that a cheap op makes of what is there in the backward pass: leaves, what
    backward nodes read, the owners `again`, or what is cheap itself. Includes `again`."""
    forward, backward = parted(graph)
    read = {s.root for t in backward if t.op is not SAVED for s in t.src}
    found = set(again)
    for t in forward:
        there = (s.root.op is None or s.root in read or s.root in found for s in t.src)
        if t.base is None and t.op is not None and t.op.cheap and all(there):
            found.add(t)
    return found


class Substitutes:
    """What backward nodes read instead of the forward owners `replaced`: the same ops once more, on
    what is read instead of their sources. `given` are substitutes from elsewhere."""

    def __init__(
        self, graph: Graph, replaced: Set[Tensor], given: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        self._graph, self._replaced = graph, replaced
        self._number = {t: i for i, t in enumerate(graph.nodes)}
        self._found = dict(given or {})
        self._steps: list[Tensor] = []
        self._smaller = defaultdict[Tensor, list[Tensor]](list)
        for t in parted(graph)[0]:
            if t in replaced and len(t.src) == 1 and t.n_bytes < t.src[0].n_bytes:
                self._smaller[t.src[0]].append(t)

    def apply(self, forward: Sequence[Tensor]) -> Graph:
        """The graph with these forward nodes, whose backward nodes read the substitutes.

        A substitute stands right before the first node that reads it; but if it is smaller than
        its only source, right after that, whose memory may then be free.
        """
        for t in parted(self._graph)[1]:
            if t.op is not SAVED:
                for s in t.src:
                    self._make(s)
                self._renew(t)
        outputs = (self._found.get(t, t) for t in self._graph.outputs)
        return Graph.of(*outputs, steps=(*forward, *self._steps)).noted(self._graph.notes)

    def _make(self, wanted: Tensor) -> None:
        """The substitute of what a backward node reads, if it has one, and all that this needs."""
        for t in self._missing(wanted):
            if t not in self._found:
                self._renew(t)
            for small in self._smaller.get(t, ()):
                if small not in self._found:
                    self._renew(small)

    def _renew(self, t: Tensor) -> None:
        """Let t, or a new node in its stead, read what stands for its sources."""
        src = tuple(self._found.get(s, s) for s in t.src)
        new = t
        if src != t.src or t.root in self._replaced:
            new = self._found[t] = t.reading(src)
            self._found |= zip(t.saved, new.saved, strict=True)
        self._steps.append(new)

    def _missing(self, wanted: Tensor) -> Iterator[Tensor]:
        """The forward nodes that `wanted` needs to be made again, sources before users."""
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
