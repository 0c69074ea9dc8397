"""Plan every device's part of a graph. A graph that one host runs alone is planned as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyggml.alloc import Plan, plan
from pyggml.backends import Backend
from pyggml.graph import Graph
from pyggml.op import has_kernel
from pyggml.schedule.assign import assign
from pyggml.schedule.split import Copy, Part, Split, split
from pyggml.tensor import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Parts in the order in which they run, and a plan of each device's memory.

    plans       of each device, one arena for all its parts
    constants   copies that are made once, when the schedule is bound
    twins       node -> the node that computes it, where that is another
    fallbacks   (device, op) -> why that device left nodes of this op to a later one
    """

    parts: Sequence[Part]
    plans: Mapping[Backend, Plan]
    constants: Sequence[Copy]
    twins: Mapping[Tensor, Tensor]
    fallbacks: Mapping[tuple[str, str], str]

    @property
    def copies(self) -> tuple[Copy, ...]:
        """Those of every run, in order."""
        return tuple(copy for part in self.parts for copy in part.copies)

    def report(self) -> str:
        """What runs where: devices with their bytes, parts, copies, and what was left to others."""
        lines = []
        for backend, found in self.plans.items():
            sizes = [len(part.nodes) for part in self.parts if part.backend is backend]
            about = f"{sum(sizes)} nodes in {len(sizes)} parts, {found.n_bytes:,} bytes"
            lines.append(f"{backend.name}: {about}")
        lines.append(f"{len(self.copies)} copies a run, {len(self.constants)} made once")
        lines += [f"{device} leaves {op}: {why}" for (device, op), why in self.fallbacks.items()]
        return "\n".join(lines)


def schedule(graph: Graph, backends: Sequence[Backend]) -> Schedule:
    """Assign, split and plan; earlier backends are preferred.

    Raises PyggmlError, naming op and tensor, if no backend takes a node.
    """
    assignment = assign(graph, backends)
    used = {b for b in assignment.backends.values() if b is not None}
    hosts = [b for b in backends if b.is_host]
    if hosts and len(used) <= 1 and used <= set(hosts):
        only = next(iter(used), hosts[0])
        nodes = [t for t in graph.nodes if has_kernel(t)]
        found = Split([Part(only, [], nodes)] if nodes else [], {only: graph}, [], {})
    else:
        found = split(graph, assignment, hosts[0] if hosts else None)
    plans = {backend: plan(part, backend) for backend, part in found.graphs.items()}
    return Schedule(found.parts, plans, found.constants, found.twins, assignment.fallbacks)
