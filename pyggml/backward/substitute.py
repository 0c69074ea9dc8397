"""The common part of the passes over a finished backward graph: forward nodes stay as they are, and
backward nodes read substitutes of some of them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from pyggml.graph import Graph
from pyggml.graph.op import SAVED
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import Tensor
from pyggml.ops.layout.cpy import CPY


def forward_and_backward(graph: Graph) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(Forward nodes, backward nodes) of build_backward's graph. The loss is the last forward
    node."""
    loss = graph["loss"]
    n_forward = graph.nodes.index(loss) + 1 if loss.op is not None else 0
    return graph.nodes[:n_forward], graph.nodes[n_forward:]


def irreplaceable(graph: Graph) -> set[Tensor]:
    """Owners that no pass may replace: the loss, the boundaries of layers, memory that a forward
    node changes, and the results of nodes that read such memory."""
    forward, _ = forward_and_backward(graph)
    changed = {t.root for t in forward if t.is_write}
    around = {t.root for t in forward if any(s.root in changed for s in t.src)}
    return {graph["loss"].root} | changed | around | {t.root for t in graph.notes.boundaries}


def recomputable(graph: Graph, again: Iterable[Tensor] = ()) -> set[Tensor]:
    """The owners `again`, and all forward owners that cheap ops can compute again, as can a copy of
    a leaf in another type.

    The backward pass has the sources of such an op: each is a leaf, is read by a backward node, is
    in `again`, or is cheap itself.
    """
    forward, backward = forward_and_backward(graph)
    read = {s.root for t in backward if t.op is not SAVED for s in t.src}
    owners = set(again)
    for t in forward:
        there = (s.root.op is None or s.root in read or s.root in owners for s in t.src)
        is_copy = t.op is CPY and t.src[0].op is None
        if t.base is None and t.op is not None and (t.op.cheap or is_copy) and all(there):
            owners.add(t)
    return owners


def with_substitutes(
    graph: Graph,
    again: Set[Tensor],
    forward: Sequence[Tensor],
    given: Mapping[Tensor, Tensor] | None = None,
) -> Graph:
    """The graph of these forward nodes, whose backward nodes read substitutes of the forward owners
    `again`.

    A substitute is the same op once more, on the substitutes of its sources; `given` holds those
    that exist already. It stands right before its first reader. One exception saves memory: if it
    is smaller than its only source, it follows the source at once, whose memory may then be free.
    """
    substitutes = _Substitutes(graph, again, given or {})
    replacements, steps = dict[Tensor, Tensor](), list(forward)
    for t in forward_and_backward(graph)[1]:
        if t.op is not SAVED:
            for s in t.src:
                steps += substitutes.missing(s)
            steps.append(t)
            src = substitutes.of_each(t.src)
            if src != t.src:
                replacements[t] = t.reading(src)
    outputs = substitutes.of_each(graph.outputs)
    return rewrite(replace(graph, outputs=outputs), replacements, steps)


class _Substitutes:
    """The substitutes made so far."""

    def __init__(self, graph: Graph, again: Set[Tensor], given: Mapping[Tensor, Tensor]) -> None:
        self._again, self._new = again, dict(given)
        self._places = graph.places
        self._smaller = defaultdict[Tensor, list[Tensor]](list)
        for t in forward_and_backward(graph)[0]:
            if t in again and len(t.src) == 1 and t.n_bytes < t.src[0].n_bytes:
                self._smaller[t.src[0]].append(t)

    def of_each(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The substitute of each, or itself."""
        return tuple(map(self._new.get, tensors, tensors))

    def missing(self, source: Tensor) -> Sequence[Tensor]:
        """Make the substitutes that `wanted` still lacks, its own included, sources first."""
        if source in self._new or not self._is_made_again(source):  # most
            return ()
        lacking = (each for t in self._lacking(source) for each in (t, *self._smaller.get(t, ())))
        return [self._make(t) for t in lacking if t not in self._new]

    def _make(self, t: Tensor) -> Tensor:
        new = self._new[t] = t.reading(self.of_each(t.src))
        self._new |= zip(t.saved, new.saved, strict=True)
        return new

    def _lacking(self, source: Tensor) -> Iterator[Tensor]:
        """The forward nodes to compute again for `wanted`, sources before users."""
        needed, stack = set[Tensor](), [source]
        while stack:
            t = stack.pop()
            if t not in needed and t not in self._new and self._is_made_again(t):
                needed.add(t)
                stack.extend(t.src)
        return (t for t in sorted(needed, key=self._places.__getitem__) if t.op is not SAVED)

    def _is_made_again(self, t: Tensor) -> bool:
        maker = t.src[0] if t.op is SAVED else t
        return t.op is not None and maker.root in self._again
