"""Cut a graph where it goes from one device to another, and put copies at the seams.

The parts are runs of nodes on one device, in the order of the graph. A node that reads another
device's tensor is replaced by a twin that reads a copy:

    host   x ─ norm ───────────────┐         host   x ─ norm
                                   │   ->              ╎ copy
    device            w ─ mul_mat ─┘         device  norm' ─ mul_mat', w'

A copy is made once per run; of a leaf over a read-only array, such as a mapped weight, once at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from pyggml.backends import CPU, Backend, is_constant
from pyggml.graph import Graph
from pyggml.op import COPIED, SAVED, SEEN, has_kernel
from pyggml.schedule.assign import Assignment
from pyggml.tensor import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """`source`, which lies with one device, is copied to `target`, which lies with another."""

    source: Tensor
    target: Tensor
    giver: Backend
    taker: Backend


@dataclass(slots=True, eq=False)
class Part:
    """Nodes that run on one device, after the copies that they read have been made."""

    backend: Backend
    copies: list[Copy] = field(default_factory=list)
    nodes: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """A graph in parts.

    graphs      of each device: the nodes of all its parts, what it is sent and what it sends
    constants   copies made once, before the first run
    twins       node of the whole graph -> the node that computes it
    """

    parts: Sequence[Part]
    graphs: Mapping[Backend, Graph]
    constants: Sequence[Copy]
    twins: Mapping[Tensor, Tensor]


def split(graph: Graph, assignment: Assignment, host: Backend | None = None) -> Split:
    """The parts of a graph whose nodes have devices; the graph itself stays as it is.

    `host` reads leaves, the CPU if it is not given.
    """
    return _Splitter(graph, assignment, host or CPU()).run()


class _Splitter:
    def __init__(self, graph: Graph, assignment: Assignment, host: Backend) -> None:
        self.graph, self.backends, self.host = graph, assignment.backends, host
        self.parts: list[Part] = []
        self.constants: list[Copy] = []
        self.twins: dict[Tensor, Tensor] = {}
        self.order: dict[Backend, list[list[Tensor]]] = defaultdict(lambda: [[]])  # for graphs
        self.copies: dict[tuple[Tensor, Backend], Tensor] = {}
        self.changed = {t.root for t in graph.nodes if t.base is not None and not t.is_view}

    def run(self) -> Split:
        for t in self.graph.nodes:
            if t.op is not SAVED:
                self._add(t)
        for t in self.graph.outputs:
            if t not in self.twins:
                self.twins[t] = t  # a leaf
        return Split(self.parts, self._graphs(), self.constants, self.twins)

    def _add(self, t: Tensor) -> None:
        """Append t's twin to the last part, or to a new one if that is another device's."""
        backend = self.backends[t] or self.host
        if not has_kernel(t):  # nothing runs, so it cuts no part in two
            twin = self._twin(t, tuple(self.twins.get(s, s) for s in t.src))
        else:
            if not self.parts or self.parts[-1].backend is not backend:
                self.parts.append(Part(backend))
                self.order[backend] += [], []  # copies, which come first, and nodes
            twin = self._twin(t, tuple(self._here(s, backend) for s in t.src))
            self.parts[-1].nodes.append(twin)
        self.order[backend][-1] += twin, *twin.saved

    def _twin(self, t: Tensor, src: tuple[Tensor, ...]) -> Tensor:
        base = None if t.base is None else self.twins.get(t.base, t.base)
        twin = replace(t, src=src, base=base, saved=(), data=None)
        twin.saved = tuple(replace(s, src=(twin,), data=None) for s in t.saved)
        self.twins[t] = twin
        self.twins |= zip(t.saved, twin.saved, strict=True)
        return twin

    def _here(self, s: Tensor, backend: Backend) -> Tensor:
        """What a node of this device reads for s, which has the same numbers for all readers."""
        giver = self.backends.get(s) or self.host
        if giver is backend or (s.root.op is None and backend.is_host):
            return self.twins.get(s, s)
        if (s, backend) not in self.copies:
            self.copies[s, backend] = self._copy(s, giver, backend)
        return self.copies[s, backend]

    def _copy(self, s: Tensor, giver: Backend, taker: Backend) -> Tensor:
        source = self.twins.get(s, s)
        target = _without_gaps(s)
        copy = Copy(source, target, giver, taker)
        if self._is_constant(s):
            self.constants.append(copy)
            return target
        self.parts[-1].copies.append(copy)
        self.order[taker][-2].append(target.root)
        if source.root.op is not None:  # keeps its memory until here
            seen = Tensor(source.shape, source.dtype, SEEN, (source,), base=source.root)
            self.order[giver][-1].append(seen)
        return target

    def _is_constant(self, s: Tensor) -> bool:
        return s.root.op is None and s.root not in self.changed and is_constant(s.root)

    def _graphs(self) -> dict[Backend, Graph]:
        """Constants come first and are outputs, so that their memory is used for nothing else."""
        kept: dict[Backend, list[Tensor]] = defaultdict(list)
        for copy in self.constants:
            kept[copy.taker].append(copy.target.root)
        outputs: dict[Backend, list[Tensor]] = defaultdict(list)
        for t in self.graph.outputs:
            outputs[self.backends.get(t) or self.host].append(self.twins[t])
        return {
            backend: _graph([*kept[backend], *chain(*lists)], outputs[backend], kept[backend])
            for backend, lists in self.order.items()
        }


def _without_gaps(s: Tensor) -> Tensor:
    """Memory for a copy of s, with the axes in its order: kernels may count on a transposed one."""
    axes = sorted(range(len(s.shape)), key=lambda i: -s.strides[i])
    owner = Tensor(tuple(s.shape[i] for i in axes), s.dtype, COPIED, name=s.name)
    if axes == sorted(axes):
        return owner
    strides = tuple(owner.strides[axes.index(i)] for i in range(len(axes)))
    return Tensor(s.shape, s.dtype, SEEN, (owner,), name=s.name, strides=strides, base=owner)


def _graph(nodes: list[Tensor], outputs: list[Tensor], kept: list[Tensor]) -> Graph:
    leaves = {s: None for t in nodes for s in t.src if s.op is None}
    return Graph(tuple(nodes), tuple(leaves), (*outputs, *kept))
