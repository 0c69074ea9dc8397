"""The kernel calls of one plan: its tensors get their memory, each node its kernel."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from pyggml.alloc import Plan
from pyggml.errors import PyggmlError
from pyggml.graph.arrays import array
from pyggml.graph.call import Call
from pyggml.graph.op import RETURNED, SENT, STREAMED, computes
from pyggml.graph.tensor import Tensor
from pyggml.jit import compile_for
from pyggml.runtime.schedule import Schedule

_LINE = 64  # bytes, to which memory is aligned


def attach(p: Plan, arena: Any) -> None:
    """Give all tensors of a plan their memory."""
    for t, offset in p.offsets.items():
        p.backend.attach(t, arena, offset)


def parked_bytes(p: Plan) -> int:
    """Bytes of a plan's results that the host gets until they are read again."""
    return sum(_room(t) for t in p.graph.nodes if t.op is SENT)


def _room(t: Tensor) -> int:
    return -(-t.n_bytes // _LINE) * _LINE


def kernel_calls(p: Plan, arena: Any, parked: np.ndarray | None = None) -> dict[Tensor, Call]:
    """Node → its kernel with its arguments, or its copy, in the order of execution.

    parked: the host's memory for what it gets, uint8
    Raises PyggmlError, naming op and tensor, for a node that the backend does not support.
    """
    attach(p, arena)
    calls: dict[Tensor, Call] = {}
    places, end = dict[Tensor, np.ndarray](), 0
    for t in p.graph.nodes:
        if t.op is STREAMED:
            calls[t] = p.backend.bind_stream(t, array(t.params["leaf"]))
        elif t.op is SENT:
            assert parked is not None
            back = t.params["returned"]
            places[back] = parked[end : end + t.n_bytes]
            calls[t] = p.backend.bind_send(t, places[back])
            end += _room(t)
        elif t.op is RETURNED:
            calls[t] = p.backend.bind_return(t, places[t])
        elif computes(t):
            calls[t] = _kernel_call(p, t, arena)
    return calls


def compile_backwards(schedule: Schedule) -> Iterator[Tensor]:
    """Compile what the host runs of a schedule from the last node to the first; yields each node,
    runs none.

    Meant for a second process. The first one runs the schedule, compiles from the front, and finds
    the rest compiled.
    """
    for p in schedule.plans.values():
        if p.backend.is_host:
            arena = p.backend.alloc(p.n_bytes)  # never written, so it takes no pages
            attach(p, arena)
            for t in reversed(_nodes_with_kernels(p)):
                call = _kernel_call(p, t, arena)
                compile_for(call.kernel, call.arguments)
                yield t


def _nodes_with_kernels(p: Plan) -> list[Tensor]:
    return [t for t in p.graph.nodes if computes(t)]


def _kernel_call(p: Plan, node: Tensor, arena: Any) -> Call:
    reason = p.backend.refusal(node)
    if reason:
        raise PyggmlError(f"{p.backend.name} cannot run {node!r}: {reason}")
    in_place = node in p.reused and p.reused[node] is node.src[0].root
    return p.backend.bind(node, arena, p.scratch.get(node), p.shared.get(node), in_place)
