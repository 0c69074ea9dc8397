"""A table of rewrites: patterns of nodes, and what comes in their place."""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from pyggml.graph.graph import Graph
from pyggml.graph.op import has_kernel
from pyggml.graph.overwriting import changed_pieces, maker, meet, piece_of
from pyggml.graph.pattern import Match, Pattern
from pyggml.graph.rewrite import Replacements, rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import graph_pass


@dataclass(frozen=True, slots=True)
class Rewrite:
    """What is matched, what must hold of it, and what comes instead: {old: new}.

    A node that is matched and not replaced is gone: so others must not read it. What a new node
    computes is its op's reference.
    """

    pattern: Pattern
    holds: Callable[[Match], bool]
    becomes: Callable[[Match], Replacements]


@graph_pass
def by_table(graph: Graph, table: Iterable[Rewrite]) -> Graph:
    """The graph after all rewrites of a table that fit, the first ones first; the same graph if
    none does. No node is of two matches.

    One new node in place of several stands where they can run at once: none of them needs what
    another node makes of them, and no memory that they touch is changed between them.
    """
    joining = _Joining(graph)
    for each in table:
        for m in each.pattern.matches(graph, joining.taken):
            if each.holds(m):
                joining.enter(m, each.becomes(m))
    return rewrite(graph, joining.new)


class _Joining:
    """The replacements so far.

    taken    nodes of the matches
    spans    first and last place of nodes that one new node stands for, in their order;
    longest  most places from one to the other
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.new: dict[Tensor, Tensor] = {}
        self.taken: set[Tensor] = set()
        self.spans: list[tuple[int, int]] = []
        self.longest = 0

    def enter(self, m: Match, replacements: Replacements) -> None:
        """Enter a match, unless it cannot be."""
        gone = [t for t in m.nodes if t not in replacements]
        makers = {maker(t) for t in replacements.values()}
        if m.is_read(*gone) or not replacements:
            return
        if len(makers) == 1 and not self._can_be_one(m.nodes, *makers):
            return
        self.new |= replacements
        self.taken.update(m.nodes)
        if len(makers) == 1:
            first, last = self._span(m.nodes)
            insort(self.spans, (first, last))
            self.longest = max(self.longest, last - first)

    def _span(self, nodes: Collection[Tensor]) -> tuple[int, int]:
        places = [self.graph.places[t] for t in nodes]
        return min(places), max(places)

    def _can_be_one(self, nodes: Collection[Tensor], new: Tensor) -> bool:
        """Whether these can run at once, as a new node."""
        first, last = self._span(nodes)
        changed = [piece for t in nodes for piece in changed_pieces(t)]
        ours = changed + [piece_of(s) for t in nodes for s in t.src]
        for t in self.graph.nodes[first:last]:
            if t in nodes or not has_kernel(t):
                continue
            if meet(ours, changed_pieces(t)) or meet(changed, map(piece_of, t.src)):
                return False
        return not self._needs(new, nodes, first)

    def _needs(self, new: Tensor, nodes: Collection[Tensor], first: int) -> bool:
        """Whether a node needs what it stands for, where others are replaced as they are so far.
        first: place of the first of these nodes."""
        for i in reversed(range(bisect_left(self.spans, (first,)))):
            begin, end = self.spans[i]
            if begin + self.longest <= first:  # and so do all that are left
                break
            if first < end:  # what stands before may need what stands behind
                first = begin
        seen, stack = set[Tensor](), [*new.src]
        while stack:
            t = stack.pop()
            if maker(t) in nodes:
                return True
            if t not in seen:
                seen.add(t)
                if t in self.new:
                    stack.append(self.new[t])
                elif self.graph.places.get(t, first + 1) > first:
                    stack += t.src
        return False
