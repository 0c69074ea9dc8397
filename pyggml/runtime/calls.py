"""Plan → numbers: each kernel is bound to its memory once, then all run in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from pyggml.alloc import Plan, plan
from pyggml.backends import CPU, Backend
from pyggml.errors import PyggmlError
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.op import has_kernel
from pyggml.graph.tensor import Tensor
from pyggml.jit import compile_for

__all__ = ["Program", "bind", "compile_backwards", "compute", "results", "run"]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A plan with memory: `calls` in the order of execution, and the node of each call."""

    plan: Plan
    arena: Any
    nodes: tuple[Tensor, ...]
    calls: tuple[Call, ...]

    def __call__(self) -> None:
        """Compute every output of the graph; allocates nothing."""
        for call in self.calls:
            call()

    def read(self, t: Tensor) -> np.ndarray:
        """A copy of a tensor's numbers, as the backend has them.

        Those of an output stay until the next run, those of another node until its memory is
        reused.
        """
        return self.plan.backend.read(t)


Tap = Callable[[], None]


def bind(
    p: Plan,
    arena: Any = None,
    release: bool = False,
    taps: Mapping[Tensor, Tap] = MappingProxyType({}),
) -> Program:
    """Take memory for a plan (or use `arena`, at least p.n_bytes long) and bind every kernel call.

    release: after each node, free the pages of the weights that it read from a file. This pays
    where each read serves many tokens.
    taps: node → what is called each time that the node has just run, when its numbers can be read,
    and those of its sources unless it wrote over them. Raises PyggmlError, naming op and tensor,
    for a node that the backend does not support.
    """
    device = p.backend
    if arena is None:
        arena = device.alloc(p.n_bytes)
    nodes = _attached(p, arena)
    calls = []
    for t in nodes:
        call = _call(p, t, arena)
        if t in taps:
            call = Call(_one_after_the_other, call, taps[t])
        calls.append(_releasing(call, t, device) if release else call)
    return Program(p, arena, nodes, tuple(calls))


def compile_backwards(p: Plan) -> Iterator[Tensor]:
    """Compile the kernels of a plan from the last node to the first; yields each node, runs none.

    Meant for a second process. The first one runs the plan, compiles from the front, and finds the
    rest compiled.
    """
    arena = p.backend.alloc(p.n_bytes)  # never written, so it takes no pages
    for t in reversed(_attached(p, arena)):
        call = _call(p, t, arena)
        compile_for(call.kernel, call.arguments)
        yield t


def _attached(p: Plan, arena: Any) -> tuple[Tensor, ...]:
    """Give all tensors of a plan their memory; returns the nodes to compute."""
    for t, offset in p.offsets.items():
        p.backend.attach(t, arena, offset)
    return tuple(t for t in p.graph.nodes if has_kernel(t) and (t.n_elements or t.saved))


def _call(p: Plan, node: Tensor, arena: Any) -> Call:
    reason = p.backend.unsupported(node)
    if reason:
        raise PyggmlError(f"{p.backend.name} cannot run {node!r}: {reason}")
    return p.backend.bind(node, arena, p.scratch.get(node), p.shared.get(node))


def _releasing(call: Call, node: Tensor, device: Backend) -> Call:
    leaves = (s.root for s in node.src if s.root.op is None)
    after = [c for leaf in leaves if (c := device.release(leaf)) is not None]
    return Call(_one_after_the_other, call, *after) if after else call


def _one_after_the_other(*calls: Callable[[], None]) -> None:
    for call in calls:
        call()


def compute(p: Plan) -> Program:
    """Bind a plan and run it once; the program gives the numbers of the graph's outputs."""
    program = bind(p)
    program()
    return program


def run(*outputs: Tensor, backend: Backend | None = None) -> list[np.ndarray]:
    """Plan, bind and run the graph of these outputs; returns copies of their values.

    backend: the device, and how it multiplies by quantised weights; by default the CPU, in float32.
    """
    return results(Graph.of(*outputs), backend)


def results(graph: Graph, backend: Backend | None = None) -> list[np.ndarray]:
    """Plan, bind and run a graph; returns copies of its outputs' values."""
    program = compute(plan(graph, backend or CPU()))
    return [program.read(t) for t in graph.outputs]
