"""Cut a graph where it goes from one device to another, and put copies at the seams.

The parts are runs of nodes on one device, in the order of the graph. A node that reads another
device's tensor is replaced by a twin that reads a copy:

    host   x ─ norm ───────────────┐         host   x ─ norm
                                   │   ->              ╎ copy
    device            w ─ mul_mat ─┘         device  norm' ─ mul_mat', w'

The result of a node is copied once in every run. For a leaf, `Devices` keeps the copy.

This is no `rewrite`: one graph becomes several, and what stands for a tensor depends on the device
of its reader.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from pyggml.backends import Backend
from pyggml.graph import Graph
from pyggml.graph.op import COPIED, SAVED, SEEN, SENT, changed_by, has_kernel
from pyggml.graph.tensor import Tensor
from pyggml.runtime.assign import Assignment
from pyggml.runtime.devices import Devices
from pyggml.runtime.stream import streams


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A copy of `source`, a result of one device, into `target`, memory of another."""

    source: Tensor
    target: Tensor
    giver: Backend
    taker: Backend


@dataclass(slots=True, eq=False)
class DevicePart:
    """Consecutive nodes of one device; before them, the copies that they read are made.

    leaves    the leaves that the nodes read or change, directly or through views
    changed   those leaves that they change
    """

    backend: Backend
    copies: list[Copy] = field(default_factory=list)
    nodes: list[Tensor] = field(default_factory=list)
    leaves: dict[Tensor, None] = field(default_factory=dict)
    changed: dict[Tensor, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """A graph in parts.

    graphs      of each device: the nodes of all its parts, and the copies that it gets and gives
    twins       node of the whole graph -> the node that computes it
    """

    parts: Sequence[DevicePart]
    graphs: Mapping[Backend, Graph]
    twins: Mapping[Tensor, Tensor]


def split(graph: Graph, assignment: Assignment, devices: Devices) -> Split:
    """The parts of a graph with assigned nodes; the graph itself stays as it is."""
    return _Splitter(graph, assignment, devices).run()


class _Splitter:
    def __init__(self, graph: Graph, assignment: Assignment, devices: Devices) -> None:
        self.graph, self.backends, self.devices = graph, assignment.backends, devices
        self.parts: list[DevicePart] = []
        self.twins: dict[Tensor, Tensor] = {}
        self.order: dict[Backend, list[list[Tensor]]] = defaultdict(lambda: [[]])  # for graphs
        self.copies: dict[tuple[Tensor, Backend], Tensor] = {}
        self.leaves: dict[tuple[Tensor, Backend], Tensor] = {}
        self.streams = streams(graph, self.backends, devices.ahead, devices.parked)

    def run(self) -> Split:
        for t in self.graph.nodes:
            if t.op is not SAVED:
                self._add(t)
        return Split(self.parts, self._graphs(), self.twins)

    def _add(self, t: Tensor) -> None:
        """Append t's twin to the last part, or to a new one if that is another device's."""
        backend = self.backends[t]
        if not has_kernel(t):  # nothing runs, so it cuts no part in two
            if backend is not None:
                twin = self._twin(t, tuple(self.twins.get(s, s) for s in t.src))
                self.order[backend][-1].append(twin)
            return
        assert backend is not None
        if not self.parts or self.parts[-1].backend is not backend:
            self.parts.append(DevicePart(backend))
            self.order[backend] += [], []  # copies, which come first, and nodes
        part = self.parts[-1]
        begun = self.streams.before.get(t, ())
        part.nodes += begun
        self.order[backend][-1] += begun
        twin = self._twin(t, tuple(self._source(s, t, backend) for s in t.src))
        part.nodes.append(twin)
        part.changed |= dict.fromkeys(root for root in changed_by(t) if root.op is None)
        self.order[backend][-1] += twin, *twin.saved
        for result in filter(self.streams.parked.get, (t, *t.saved)):
            here, to = self.twins[result], {"returned": self.streams.parked[result]}
            sent = Tensor(here.shape, here.dtype, SENT, (here,), to, result.name, base=here)
            part.nodes.append(sent)
            self.order[backend][-1].append(sent)

    def _twin(self, t: Tensor, src: tuple[Tensor, ...]) -> Tensor:
        twin = self.twins[t] = t.reading(src)
        self.twins |= zip(t.saved, twin.saved, strict=True)
        return twin

    def _source(self, s: Tensor, reader: Tensor, backend: Backend) -> Tensor:
        """What the twin of a reader reads instead of s."""
        copy = self.streams.copies.get((reader, s.root))
        if copy is None:
            return self._here(s, backend)
        if s is s.root:
            return copy
        view = Tensor(
            s.shape, s.dtype, SEEN, (copy,), {}, s.name, s.strides, copy, s.offset
        )  # fmt: skip
        self.order[backend][-1].append(view)
        return view

    def _here(self, s: Tensor, backend: Backend) -> Tensor:
        """The tensor that nodes of this device read instead of s; one for all readers."""
        if s.root.op is None:
            self.parts[-1].leaves[s.root] = None
            if (s, backend) not in self.leaves:
                self.leaves[s, backend] = self.devices.planned_copy(s, backend)
            return self.leaves[s, backend]
        giver = self.backends[s]
        assert giver is not None
        if giver is backend:
            return self.twins[s]
        if (s, backend) not in self.copies:
            shows = s.src[0] if s.is_view else s
            is_whole = s.n_elements == shows.n_elements and shows.is_contiguous and not s.offset
            if s is not shows and is_whole:  # all of a result that may be there already
                copy = self.copies[s, backend] = s.reading((self._here(shows, backend),))
                self.order[backend][-2].append(copy)
            else:
                self.copies[s, backend] = self._copy(s, giver, backend)
        return self.copies[s, backend]

    def _copy(self, s: Tensor, giver: Backend, taker: Backend) -> Tensor:
        """A copy of s for the last part, made right before it; until then s keeps its memory."""
        source, target = self.twins[s], without_gaps(s)
        self.parts[-1].copies.append(Copy(source, target, giver, taker))
        self.order[taker][-2] += dict.fromkeys((target.root, target))
        seen = Tensor(source.shape, source.dtype, SEEN, (source,), base=source.root)
        self.order[giver][-1].append(seen)
        return target

    def _graphs(self) -> dict[Backend, Graph]:
        outputs: dict[Backend, list[Tensor]] = defaultdict(list)
        for t in self.graph.outputs:
            if t.root.op is not None:
                home = self.backends[t]
                assert home is not None
                outputs[home].append(self.twins[t])
        return {
            backend: _graph(list(chain(*lists)), outputs[backend])
            for backend, lists in self.order.items()
        }


def without_gaps(s: Tensor) -> Tensor:
    """A tensor for a copy of s: without gaps, but with s's order of axes in memory."""
    axes = sorted(range(len(s.shape)), key=lambda i: -s.strides[i])
    owner = Tensor(tuple(s.shape[i] for i in axes), s.dtype, COPIED, name=s.name)
    if axes == sorted(axes):
        return owner
    strides = tuple(owner.strides[axes.index(i)] for i in range(len(axes)))
    return Tensor(s.shape, s.dtype, SEEN, (owner,), name=s.name, strides=strides, base=owner)


def _graph(nodes: list[Tensor], outputs: list[Tensor]) -> Graph:
    leaves = {s: None for t in nodes for s in t.src if s.op is None}
    return Graph(tuple(nodes), tuple(leaves), tuple(outputs))
