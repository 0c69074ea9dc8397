"""Assign nodes to devices: each goes to the first backend that supports it.

Views and writers stay with the memory that they view or change. All writers of one leaf run on one
device, the first that supports them all, so that the leaf is not copied to and fro. Where leaves
are placed (runtime/place.py), a node's own device is asked before the others.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pyggml.backends import Backend
from pyggml.errors import PyggmlError
from pyggml.graph import Graph
from pyggml.graph.op import SAVED, changed_by, has_kernel
from pyggml.graph.tensor import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """backends: node -> the device that computes it, None for views of leaves.

    fallbacks: (device, op) -> why that device left nodes of this op to a later one.
    """

    backends: Mapping[Tensor, Backend | None]
    fallbacks: Mapping[tuple[str, str], str]


def assign(
    graph: Graph,
    backends: Sequence[Backend],
    homes: Mapping[Tensor, Backend] = MappingProxyType({}),
) -> Assignment:
    """Give every node of the graph a device. homes: of nodes, the one that is asked first.

    Raises PyggmlError, naming op and tensor, if no backend takes a node.
    """
    if backends and not homes and _takes_all(backends[0], graph):
        return Assignment({t: backends[0] if _is_computed(t) else None for t in graph.nodes}, {})
    writers: dict[Tensor, list[Tensor]] = defaultdict(list)
    for t in graph.nodes:
        for written in changed_by(t):
            writers[written].append(t)
    devices: dict[Tensor, Backend | None] = {}
    fallbacks: dict[tuple[str, str], str] = {}
    for t in graph.nodes:
        if t.op is SAVED:
            devices[t] = devices[t.src[0]]
        elif t.root.op is not None and t.root is not t:
            devices[t] = devices[t.root]
        elif has_kernel(t):
            into = [w for written in (t, *t.saved, *changed_by(t)) for w in writers[written]]
            order = dict.fromkeys((homes.get(t, backends[0]), *backends)) if backends else ()
            devices[t] = _first(t, into, [*order], fallbacks)
        else:
            devices[t] = None
    return Assignment(devices, fallbacks)


def _takes_all(backend: Backend, graph: Graph) -> bool:
    """Whether one device can run the whole graph, as the CPU alone can: there is no choice."""
    return all(backend.refusal(t) is None for t in graph.nodes if has_kernel(t))


def _is_computed(t: Tensor) -> bool:
    """Whether a node is no view of a leaf."""
    return t.root.op is not None or has_kernel(t)


def _first(
    t: Tensor,
    writers: Sequence[Tensor],
    backends: Sequence[Backend],
    fallbacks: dict[tuple[str, str], str],
) -> Backend:
    """The first device that can run t and all writers of the same memory."""
    faults = []
    for backend in backends:
        fault = _fault(t, writers, backend)
        if fault is None:
            return backend
        node, reason = fault
        assert node.op is not None
        fallbacks.setdefault((backend.name, node.op.name), reason)
        faults.append(f"{backend.name} cannot run {node!r}: {reason}")
    raise PyggmlError("; ".join(faults) or f"there is no backend to run {t!r}")


def _fault(t: Tensor, writers: Sequence[Tensor], backend: Backend) -> tuple[Tensor, str] | None:
    for node in {t: None, **dict.fromkeys(writers)}:
        reason = backend.refusal(node)
        if reason is not None:
            return node, reason
    return None
