"""The planner: one walk over the graph, in the order of execution, that decides every address."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from pyggml.alloc.fit import Arena
from pyggml.alloc.lifetime import FOREVER, Lifetime, lifetimes, owners, reusable_source
from pyggml.alloc.sharing import sharing
from pyggml.backends import CPU, Backend
from pyggml.graph import Graph
from pyggml.op import SAVED, has_kernel
from pyggml.tensors import Tensor


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


def plan(
    graph: Graph, backend: Backend | None = None, reuse: bool = True, share: bool = True
) -> Plan:
    """The memory of a graph on a backend; by default the CPU, in float32.

    For tests and timings: reuse=False gives every tensor an address of its own, share=False lets
    every node pack its sources for itself. Results are bitwise the same.
    """
    return _Planner(graph, backend or CPU(), reuse, share).run()


class _Planner:
    def __init__(self, graph: Graph, backend: Backend, reuse: bool, share: bool) -> None:
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
                self.offsets[s] = self.arena.take(s.n_bytes)
            scratch = self.shared.get(node)
            if scratch is not None and scratch not in self.offsets:
                self.offsets[scratch] = self.arena.take(scratch.n_bytes)
            self._take_scratch(node)
            self._release(i)
        found = self.offsets, self.scratch, self.reused, self.shared, self.lives
        return Plan(self.graph, self.backend, *found, self.arena.peak)

    def _share(self) -> None:
        """Enter what nodes share, alive from the first of them to the last."""
        index = {t: i for i, t in enumerate(self.graph.nodes)}
        for scratch, nodes in sharing(self.graph, self.backend):
            self.lives[scratch] = Lifetime(index[nodes[0]], index[nodes[-1]])
            self.shared |= dict.fromkeys(nodes, scratch)

    def _place(self, node: Tensor, i: int) -> None:
        source = reusable_source(node, i, self.lives) if self.reuse else None
        if source is None:
            self.offsets[node] = self.arena.take(node.n_bytes)
        else:
            self.offsets[node] = self.offsets[source]
            self.reused[node] = source
            self.inherited.add(source)

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
            if t not in self.inherited:
                self.arena.give_back(self.offsets[t], t.n_bytes)
