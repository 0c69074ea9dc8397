"""Where nodes are computed of which leaves are placed: each device's layers stay together.

A node goes where a leaf is placed that it reads, such as a weight of its block. Without one, what a
gradient's rule built goes to the node that it was built for, and others follow the result that was
computed last of those that they read, as a residual sum its branch. So activations cross where
blocks do, once each way. What depends on inputs alone, such as a table of rotations, draws nobody.

Devices that are alike have the graph rewritten as a whole, as one of them would for itself: so
their results have the bits of one. Else each device rewrites its own nodes alone, as its ops are
not those of others. What comes from another device is a copy to it, as it will be once the graph is
split.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pyggml.backends import Backend
from pyggml.graph import Graph
from pyggml.graph.op import SAVED, changed_by, has_kernel
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import Tensor
from pyggml.runtime.devices import Devices
from pyggml.runtime.split import without_gaps

Homes = Mapping[Tensor, Backend]  # of nodes; a view of a leaf has none


def homes_of(graph: Graph, devices: Devices) -> dict[Tensor, Backend]:
    """The device of each node."""
    homes: dict[Tensor, Backend | None] = {}  # None: of inputs alone
    written: dict[Tensor, Backend | None] = {}
    for t in graph.nodes:
        if t.op is SAVED:
            homes[t] = homes[t.src[0]]
        elif t.root is not t and t.root.op is not None:
            homes[t] = homes[t.root]
        elif has_kernel(t):
            of_leaves = (devices.home(s.root) for s in t.src if s.root.op is None)
            leaves = [root for root in changed_by(t) if root.op is None]
            results = [s for s in t.src if s.root.op is not None]
            results.sort(key=graph.places.__getitem__, reverse=True)
            of_forward = homes.get(graph.notes.backward.get(t, t))
            of_results = (of_forward, *(homes[s] for s in results))
            choices = (*of_leaves, *(written.get(leaf) for leaf in leaves), *of_results)
            homes[t] = next(filter(None, choices), None)
            written |= dict.fromkeys(leaves, homes[t])
    return {t: home or devices.first for t, home in homes.items()}


@dataclass(frozen=True, slots=True, eq=False)
class _Region:
    """The nodes of one device as a graph, which it has rewritten.

    results  that leave the region, of the whole graph: what they became are the outputs of `after`
    copies   what stands for a result of another device → that result
    """

    results: tuple[Tensor, ...]
    after: Graph
    copies: Mapping[Tensor, Tensor]

    @classmethod
    def of(cls, graph: Graph, homes: Homes, device: Backend) -> "_Region":
        nodes = [t for t in graph.nodes if homes.get(t) is device]
        every = {*graph.outputs}
        results = tuple(t for t in nodes if t in every or _is_read_elsewhere(t, graph, homes))
        sources = (s for t in nodes for s in t.src if s.root.op is not None)
        copies = {s: without_gaps(s) for s in sources if homes[s] is not device}
        names = dict(zip(graph.outputs, graph.names, strict=False))  # passes look for the loss
        named = tuple(names.get(t, "") for t in results)
        region = replace(graph, outputs=results, names=named)
        after = device.rewritten(rewrite(region, copies, graph.nodes))
        return cls(results, after, {copy: s for s, copy in copies.items()})


def _is_read_elsewhere(t: Tensor, graph: Graph, homes: Homes) -> bool:
    return any(homes.get(reader, homes[t]) is not homes[t] for reader in graph.readers[t])


def rewritten_in_place(graph: Graph, devices: Devices) -> tuple[Graph, Homes]:
    """The graph as its devices have it, and where its nodes are.

    Of devices that are alike the one with the least memory rewrites it. Of others it stays as it is
    if a device has joined what another one must compute in between.
    """
    homes = homes_of(graph, devices)
    used = [*dict.fromkeys(homes.values())]
    if used and all(map(used[0].is_like, used)):
        new = min(used, key=lambda device: (device.memory() or (0, 0))[0]).rewritten(graph)
        homes = homes_of(new, devices)
        return _in_runs(new, homes), homes
    regions = {device: _Region.of(graph, homes, device) for device in dict.fromkeys(homes.values())}
    joined = _Joined(regions)
    if not joined.has_all():
        return graph, homes
    outputs = [joined.image(joined.successors.get(t, t)) for t in graph.outputs]
    new = Graph.in_order(outputs, joined.homes, graph.names)
    return new, joined.homes


def _in_runs(graph: Graph, homes: Homes) -> Graph:
    """The graph in another order: of each device as many nodes follow each other as can."""
    waiting = {device: deque[Tensor]() for device in homes.values()}
    for t, device in homes.items():
        waiting[device].append(t)
    order: dict[Tensor, None] = {}
    while any(waiting.values()):
        for nodes in waiting.values():
            while nodes and all(s in order or s not in homes for s in nodes[0].src):
                order[nodes.popleft()] = None
    new = Graph.in_order(graph.outputs, order, graph.names)
    return replace(new, notes=graph.notes)


class _Joined:
    """Regions as one graph. Of each device as many nodes follow each other as can.

    successors   result that leaves its region → what stands for it after the rewriting
    homes        the new nodes, in their order, with their devices
    """

    def __init__(self, regions: Mapping[Backend, _Region]) -> None:
        self._regions, self.homes = regions, dict[Tensor, Backend]()
        self._images: dict[Tensor, Tensor] = {}
        self._copies = {copy: s for each in regions.values() for copy, s in each.copies.items()}
        self.successors: dict[Tensor, Tensor] = {}
        for each in regions.values():
            self.successors |= zip(each.results, each.after.outputs, strict=True)

    def has_all(self) -> bool:
        """Take all nodes in; returns whether each has what it reads before it."""
        waiting = {
            device: deque(
                t for t in each.after.nodes if t not in self._copies and t.op is not SAVED
            )
            for device, each in self._regions.items()
        }
        n_stuck = 0
        while any(waiting.values()) and n_stuck <= max(map(len, waiting.values())):
            n = len(self._images)
            for device, nodes in waiting.items():
                while nodes and self._take(nodes[0], device):
                    nodes.popleft()
            n_stuck = n_stuck + 1 if n == len(self._images) else 0
            for nodes in waiting.values() if n_stuck else ():
                nodes.rotate(-1)
        return not any(waiting.values())

    def image(self, t: Tensor) -> Tensor:
        """What stands for a tensor of a region in the whole graph. KeyError if it is not there."""
        if t in self._copies:
            t = self.successors[self._copies[t]]
            return self.image(t)
        if t.op is SAVED:
            (maker,) = t.src
            return self._images[maker].saved[maker.saved.index(t)]
        return t if t.op is None else self._images[t]

    def _take(self, t: Tensor, device: Backend) -> bool:
        try:
            src = tuple(self.image(s) for s in t.src)
        except KeyError:
            return False
        is_same = all(new is s for new, s in zip(src, t.src, strict=True))
        image = self._images[t] = t if is_same else t.reading(src)
        if image.root.op is not None or has_kernel(image):
            self.homes |= dict.fromkeys((image, *image.saved), device)
        return True
