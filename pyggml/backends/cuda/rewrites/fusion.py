"""Fusion: nodes that one kernel computes together, so that numbers stay in registers between them.

A `Pattern` names the ops of such nodes, in their order, and binds a kernel to their memory. Each
family of ops declares its own. `fused` looks for them in the calls of a program. Each node of a
pattern but the last gives its result to a later one, or shares a source with it. The pattern runs
in the position of its last node, or of its first. Other nodes may stand between, if the pattern's
can move past them: neither may change memory that the other touches.

A plan does not know of patterns. So a source that dies within one may have given its memory to a
result of the same pattern: then the pattern is left alone, unless its kernel works `in_place`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from pyggml.backends.cuda.rewrites.branches import changed, ranges
from pyggml.backends.cuda.runtime.kernel import BoundCall, Site
from pyggml.backends.cuda.runtime.waits import Access, Range, conflict
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.op import SEEN, has_kernel
from pyggml.graph.tensor import Tensor

_REACH = 12  # so many calls before the last one, the first one is looked for


@dataclass(frozen=True, slots=True)
class Pattern:
    """Nodes that one kernel computes.

    ops       their names, in the order of the graph
    bind      (sites, is_read) -> Call, or None where the kernel does not serve. is_read: for each
              node, whether others read its result; else the kernel need not write it
    in_place  whether results may lie where sources do: the kernel reads number i of a source before
              it writes number i of a result, and no other thread reads it
    first     whether it runs at the position of its first node, not of its last: for nodes that
              share a source, whose results others may read before the last node stands
    """

    ops: tuple[str, ...]
    bind: Callable[[Sequence[Site], Sequence[bool]], Call | None]
    in_place: bool
    first: bool


_PATTERNS: dict[str, list[Pattern]] = defaultdict(list)  # by the last op


def declare_pattern(
    *ops: str,
    bind: Callable[[Sequence[Site], Sequence[bool]], Call | None],
    in_place: bool = False,
    first: bool = False,
) -> None:
    """Enter a pattern. Of several that fit, the longest is taken."""
    found = _PATTERNS[ops[-1]]
    found.append(Pattern(ops, bind, in_place, first))


def fused(calls: Sequence[BoundCall], graph: Graph) -> list[BoundCall]:
    """The calls, those of a pattern replaced by one. `graph` has all readers of their results."""
    return _Fusion(calls, graph).run()


class _Fusion:
    def __init__(self, calls: Sequence[BoundCall], graph: Graph) -> None:
        self.calls: list[BoundCall | None] = list(calls)  # None: part of a later one
        self.readers: dict[Tensor, set[Tensor]] = defaultdict(set)
        for node in graph.nodes:
            if has_kernel(node) or node.op is SEEN:
                for s in node.src:
                    self.readers[s.root].add(node)
        self.outputs = {t.root for t in graph.outputs}
        self.accesses: dict[int, Access] = {}

    def run(self) -> list[BoundCall]:
        lengths = {len(pattern.ops) for found in _PATTERNS.values() for pattern in found}
        for length in sorted(lengths, reverse=True):
            for i, call in enumerate(self.calls):
                patterns = _PATTERNS.get(_name(call), ()) if call is not None else ()
                any(self._replace(p, i) for p in patterns if len(p.ops) == length)
        return [call for call in self.calls if call is not None]

    def _replace(self, pattern: Pattern, last: int) -> bool:
        positions = self._positions(pattern.ops, last)
        if positions is None:
            return False
        position = positions[0] if pattern.first else last
        if not all(self._can_move(i, position, positions) for i in positions):
            return False
        sites = [self._call(i).sites[0] for i in positions]
        nodes = [site.node for site in sites]
        is_read = [t is nodes[-1] or self._is_read(t, nodes) for t in nodes]
        if not _lie_apart(sites, is_read, pattern.in_place):
            return False
        call = pattern.bind(sites, is_read)
        if call is None:
            return False
        for i in positions:
            self.calls[i] = None
        self.calls[position] = BoundCall(call, *sites)
        self.accesses.pop(position, None)
        return True

    def _call(self, i: int) -> BoundCall:
        call = self.calls[i]
        assert call is not None
        return call

    def _positions(self, ops: Sequence[str], last: int) -> list[int] | None:
        """The positions of the nodes of these ops, if the pattern ends with the call `last`."""
        positions = [last]
        for name in reversed(ops[:-1]):
            members = [self._call(i).sites[0].node for i in positions]
            for i in range(positions[0] - 1, max(last - _REACH, 0) - 1, -1):
                call = self.calls[i]
                if call is not None and _name(call) == name and _is_linked(call, members):
                    positions.insert(0, i)
                    break
            else:
                return None
        return positions

    def _can_move(self, i: int, position: int, positions: Sequence[int]) -> bool:
        """Whether a call can move past all calls between it and the position."""
        between = range(min(i, position) + 1, max(i, position))
        others = (k for k in between if k not in positions and self.calls[k])
        return not any(conflict(self._access(i), self._access(k)) for k in others)

    def _access(self, i: int) -> Access:
        """What a call touches, as long as it is not part of another one."""
        if i not in self.accesses:
            self.accesses[i] = _access(self._call(i))
        return self.accesses[i]

    def _is_read(self, t: Tensor, nodes: Sequence[Tensor]) -> bool:
        """Whether a node outside the pattern, or the caller, reads the result."""
        return t.base is not None or t in self.outputs or not self.readers[t] <= set(nodes)


def _name(call: BoundCall) -> str:
    """The name of the op of a call's node; "" for a call of several nodes."""
    op = call.sites[0].node.op
    return op.name if op is not None and len(call.sites) == 1 else ""


def _is_linked(call: BoundCall, members: Sequence[Tensor]) -> bool:
    node = call.sites[0].node
    near = {node, *node.saved, *(s.root for s in node.src)}
    return any(s.root in near for t in members for s in t.src)


def _access(call: BoundCall) -> Access:
    read = chain.from_iterable((*site.src, site.shared) for site in call.sites)
    written = chain.from_iterable(map(changed, call.sites))
    return Access(ranges(a for a in read if a is not None), ranges(written))


def _lie_apart(sites: Sequence[Site], is_read: Sequence[bool], in_place: bool) -> bool:
    """Whether each node writes to memory of its own, where no source from outside lies. Of a
    pattern that works in place, a result may lie exactly where a source does."""
    own = {t for site in sites for t in (site.node, *site.node.saved)}
    reads = ranges(chain.from_iterable(_from_outside(site, own) for site in sites))
    before: list[Range] = []
    for site, others_read in zip(sites, is_read, strict=True):
        writes = ranges(list(changed(site))[0 if others_read else 1 :])
        for w in writes:
            meets_read = any(w.meets(r) and not (in_place and w == r) for r in reads)
            if meets_read or any(w.meets(other) for other in before):
                return False
        before += writes
    return True


def _from_outside(site: Site, own: set[Tensor]) -> Iterator[object]:
    return (a for s, a in zip(site.node.src, site.src, strict=True) if s.root not in own)
