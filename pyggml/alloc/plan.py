"""The planner: one walk over the graph, in the order of execution, that decides every address.

Best fit leaves gaps where short lives begin and end between long ones, as in a training step. So
there is a second plan, in which all that is alive at the peak lies side by side behind the rest,
without gaps. The smaller one is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from pyggml.alloc.fit import ALIGNMENT, Arena
from pyggml.alloc.lifetime import FOREVER, Lifetime, lifetimes, owners, reusable_source
from pyggml.alloc.sharing import sharing
from pyggml.alloc.usage import peak
from pyggml.backends import CPU, Backend
from pyggml.graph import Graph
from pyggml.op import SAVED, has_kernel
from pyggml.sizes import round_up
from pyggml.tensors import Tensor

_GAPS = 1.01  # of the bytes in use at the peak: so many, and a second plan is made


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Offsets in bytes into one arena of `n_bytes`. Planning allocates nothing.

    offsets   of every tensor that owns memory
    scratch   of each node that needs any
    reused    node -> the tensor whose memory it overwrites
    shared    node -> scratch that it shares with others; the first of them fills it
    """

    graph: Graph
    backend: Backend
    offsets: dict[Tensor, int]
    scratch: dict[Tensor, int]
    reused: dict[Tensor, Tensor]
    shared: dict[Tensor, Tensor]
    lives: dict[Tensor, Lifetime]
    n_bytes: int

    def origin(self, t: Tensor) -> Tensor:
        """The tensor that first had the memory of t."""
        while t in self.reused:
            t = self.reused[t]
        return t


def plan(
    graph: Graph, backend: Backend | None = None, reuse: bool = True, share: bool = True
) -> Plan:
    """The memory of a graph on a backend; by default the CPU, in float32.

    For tests and timings: reuse=False gives every tensor an address of its own, share=False lets
    every node pack its sources for itself. Results are bitwise the same.
    """
    backend = backend or CPU()
    found = _Planner(graph, backend, reuse, share).run()
    if not reuse or not found.lives:
        return found
    most = peak(found)
    if found.n_bytes <= _GAPS * most.n_bytes:
        return found
    lasting = {found.origin(t) for t in most.alive}
    apart = _Planner(graph, backend, reuse, share, lasting).run()
    return min(found, apart, key=lambda p: p.n_bytes)


class _Planner:
    """lasting: tensors that lie behind all others, each in memory of its own."""

    def __init__(
        self,
        graph: Graph,
        backend: Backend,
        reuse: bool,
        share: bool,
        lasting: Collection[Tensor] = (),
    ) -> None:
        self.lasting, self.behind, self.n_behind = lasting, set[Tensor](), 0
        self.graph, self.backend, self.reuse = graph, backend, reuse
        self.lives = lifetimes(graph)
        self.arena = Arena(self.backend.room)
        self.offsets: dict[Tensor, int] = {}
        self.scratch: dict[Tensor, int] = {}
        self.reused: dict[Tensor, Tensor] = {}
        self.shared: dict[Tensor, Tensor] = {}
        if share:
            self._share()
        self.inherited: set[Tensor] = set()  # the values of `reused`: their memory lives on
        self.dying: dict[int, list[Tensor]] = defaultdict(list)
        for t, life in self.lives.items():
            if life.last != FOREVER:
                self.dying[life.last].append(t)

    def run(self) -> Plan:
        own = set(owners(self.graph))
        for i, node in enumerate(self.graph.nodes):
            if node in own and node.op is not SAVED:
                self._place(node, i)
            for s in node.saved:
                self._take(s)
            scratch = self.shared.get(node)
            if scratch is not None and scratch not in self.offsets:
                self._take(scratch)
            self._take_scratch(node)
            self._release(i)
        for t in self.behind:
            self.offsets[t] += self.arena.peak
        found = self.offsets, self.scratch, self.reused, self.shared, self.lives
        return Plan(self.graph, self.backend, *found, self.arena.peak + self.n_behind)

    def _share(self) -> None:
        """Enter what nodes share, alive from the first of them to the last."""
        index = {t: i for i, t in enumerate(self.graph.nodes)}
        for scratch, nodes in sharing(self.graph, self.backend):
            self.lives[scratch] = Lifetime(index[nodes[0]], index[nodes[-1]])
            self.shared |= dict.fromkeys(nodes, scratch)

    def _place(self, node: Tensor, i: int) -> None:
        source = reusable_source(node, i, self.lives) if self.reuse else None
        if source is None:
            self._take(node)
        else:
            self.offsets[node] = self.offsets[source]
            self.reused[node] = source
            self.inherited.add(source)
            if source in self.behind:
                self.behind.add(node)

    def _take(self, t: Tensor) -> None:
        if t in self.lasting:
            self.offsets[t] = self.n_behind
            self.n_behind += round_up(t.n_bytes, ALIGNMENT)
            self.behind.add(t)
        else:
            self.offsets[t] = self.arena.take(t.n_bytes)

    def _take_scratch(self, node: Tensor) -> None:
        """Scratch is free again as soon as its node has run."""
        n_bytes = self.backend.scratch(node) if has_kernel(node) else 0
        if n_bytes:
            self.scratch[node] = self.arena.take(n_bytes)
            if self.reuse:
                self.arena.give_back(self.scratch[node], n_bytes)

    def _release(self, i: int) -> None:
        if not self.reuse:
            return
        for t in self.dying[i]:
            if t not in self.inherited and t not in self.behind:
                self.arena.give_back(self.offsets[t], t.n_bytes)
