"""Plan every device's part of a graph. A graph that one host runs alone is planned as it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType

import numpy as np

from pyggml.alloc import Plan, plan
from pyggml.backends import Backend
from pyggml.errors import GraphError
from pyggml.graph import Graph
from pyggml.graph.graph import expect_graph
from pyggml.graph.op import SENT, STREAMED, changed_by, has_kernel
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import DeviceFacts, verifies, verify
from pyggml.runtime.assign import assign
from pyggml.runtime.devices import Devices
from pyggml.runtime.place import Homes, rewritten_in_place
from pyggml.runtime.split import Copy, DevicePart, Split, split

Watcher = Callable[[np.ndarray], None]


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """A graph in parts, in the order of execution, and a plan of each device's memory.

    plans       of each device, one arena for all its parts
    twins       node -> the node that computes it on its device, if that is another one
    fallbacks   (device, op) -> why that device left nodes of this op to a later one
    watched     result of a node -> what gets its numbers in every run, as soon as they are made
    """

    graph: Graph
    devices: Devices
    parts: Sequence[DevicePart]
    plans: Mapping[Backend, Plan]
    twins: Mapping[Tensor, Tensor]
    fallbacks: Mapping[tuple[str, str], str]
    watched: Mapping[Tensor, Watcher] = field(default_factory=dict)

    @classmethod
    def of(cls, p: Plan) -> Schedule:
        """A plan of the host's as it is, in one part: no device rewrites its graph."""
        whole = _whole(p.graph, p.backend)
        return cls(p.graph, Devices([p.backend]), whole.parts, {p.backend: p}, {}, {})

    def place(self, t: Tensor) -> tuple[Tensor, Backend, int]:
        """The node that computes a result, its device, and where in the arena its memory begins.

        GraphError for a tensor of another graph.
        """
        twin = self.twins.get(t, t)
        places = (at for at in self.plans.items() if twin.root in at[1].offsets)
        home, p = next(places, (None, None))
        if home is None or p is None:
            raise GraphError(f"{t!r} is no result of this program, which computes {self.graph!r}")
        return twin, home, p.offsets[twin.root]

    @property
    def copies(self) -> tuple[Copy, ...]:
        """The results of nodes that every run copies, in order."""
        return tuple(copy for part in self.parts for copy in part.copies)

    @property
    def n_bytes(self) -> int:
        """Bytes of the arenas of all devices."""
        return sum(p.n_bytes for p in self.plans.values())

    @property
    def n_streamed(self) -> int:
        """Bytes of streamed weights that a run copies."""
        nodes = (t for p in self.plans.values() for t in p.graph.nodes)
        return sum(t.n_bytes for t in nodes if t.op is STREAMED)

    @property
    def n_parked(self) -> int:
        """Bytes of results that lie with the host until they are read again."""
        nodes = (t for p in self.plans.values() for t in p.graph.nodes)
        return sum(t.n_bytes for t in nodes if t.op is SENT)

    def bytes_on(self, backend: Backend) -> int:
        """Bytes of a device's memory that a program of this takes: leaves, arena, what stays beside
        leaves, and what the device needs of its own."""
        leaves = {leaf for part in self.parts if part.backend is backend for leaf in part.leaves}
        nodes = self.plans[backend].graph.nodes if leaves else ()
        beside = dict(chain.from_iterable(map(backend.lasting, nodes)))
        sizes = (*(leaf.n_bytes for leaf in leaves), *beside.values())
        arena = self.plans[backend].n_bytes if leaves else 0
        return backend.own(len(nodes)) + arena + sum(map(backend.allocation, sizes))

    def report(self) -> str:
        """What runs where, as text: devices with their bytes and parts, copies, fallbacks."""
        lines = []
        for backend, p in self.plans.items():
            sizes = [len(part.nodes) for part in self.parts if part.backend is backend]
            about = f"{sum(sizes)} nodes in {len(sizes)} parts, {p.n_bytes:,} bytes"
            lines.append(f"{backend.name}: {about}")
        lines.append(f"{len(self.copies)} results are copied in every run")
        lines += [f"{device} leaves {op}: {why}" for (device, op), why in self.fallbacks.items()]
        return "\n".join(lines)


def schedule(
    graph: Graph,
    devices: Devices | None = None,
    watched: Mapping[Tensor, Watcher] = MappingProxyType({}),
) -> Schedule:
    """Assign, split and plan. Warns once about each op that a device leaves to a later one.

    devices: where it runs; by default on the host alone, in float32.
    watched: result of a node -> what is to get a copy of its numbers in every run, right after they
    are made. No device computes it away, and its memory is used again as without.
    Raises PyggmlError, naming op and tensor, if no backend takes a node; GraphError for what is no
    graph.
    """
    expect_graph("schedule", graph)
    devices = devices or Devices()
    rewritten, renewed, homes = _rewritten(graph, devices, watched)
    assignment = assign(rewritten, devices.backends, homes)
    devices.say_fallbacks(assignment.fallbacks)
    used = {b for b in assignment.backends.values() if b is not None}
    if len(used) <= 1 and all(b.is_host for b in used):
        pieces = _whole(rewritten, next(iter(used), devices.host))
    else:
        pieces = split(rewritten, assignment, devices)
    for backend, part in pieces.graphs.items() if verifies() else ():
        verify(part, "split", DeviceFacts(backend.refusal, devices.has_memory(backend)))
    plans = {backend: plan(part, backend) for backend, part in pieces.graphs.items()}
    twins = {**pieces.twins, **{t: pieces.twins.get(new, new) for t, new in renewed.items()}}
    return Schedule(graph, devices, pieces.parts, plans, twins, assignment.fallbacks, watched)


def _rewritten(
    graph: Graph, devices: Devices, watched: Collection[Tensor]
) -> tuple[Graph, Mapping[Tensor, Tensor], Homes]:
    """The graph as its devices have it; which nodes now stand for outputs and what is watched; the
    device of each node, where leaves are placed."""
    before = after = graph
    if watched:
        names = graph.names and (*graph.names, *("" for _ in watched))
        before = after = replace(graph, outputs=(*graph.outputs, *watched), names=names)
    homes: Homes = {}
    after = _unfolded(after)
    if devices.homes:
        after, homes = rewritten_in_place(after, devices)
    else:
        for backend in devices.backends:
            if not backend.is_host or len(devices.backends) == 1:  # its ops are not those of others
                after = backend.rewritten(after)
    pairs = zip(before.outputs, after.outputs, strict=True)
    renewed = {t: new for t, new in pairs if t is not new}
    if watched:  # a node that is watched need not last
        outputs = tuple(renewed.get(t, t) for t in graph.outputs)
        after = replace(after, outputs=outputs, names=graph.names)
    return after, renewed, homes


def _unfolded(graph: Graph) -> Graph:
    """The graph with the ops that nodes are made of in place of these."""
    unfolded = {t: t.op.made_of(*t.src, **t.params) for t in graph.nodes if t.op and t.op.made_of}
    return rewrite(graph, unfolded)


def _whole(graph: Graph, host: Backend) -> Split:
    """The graph as one part. Its leaves may still have newer numbers on another device.

    A graph of views alone has no part: nothing runs.
    """
    nodes = [t for t in graph.nodes if has_kernel(t)]
    leaves = {s.root: None for t in nodes for s in t.src if s.root.op is None}
    changed = {root: None for t in nodes for root in changed_by(t) if root.op is None}
    parts = [DevicePart(host, [], nodes, leaves, changed)] if nodes else []
    return Split(parts, {host: graph}, {})
