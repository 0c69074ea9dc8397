"""Weights that stay with the host, and when each is copied to the device that reads it.

A copy is a node of the device's part: the plan gives it memory from there to its last reader. It
stands so far before its first reader that the copies in between are about a block's bytes; so a
device that runs nodes side by side copies the next block's weights while it computes with this
one's. A weight that is read again soon, as a block's in its own backward pass, is copied once for
all these readers.

    copy q₂ ─ q₁·x ─ copy k₂ ─ k₁·x ─ …  ─ q₂·x ─ …          memory: two blocks
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from pyggml.backends import Backend
from pyggml.graph import Graph
from pyggml.graph.op import STREAMED, has_kernel
from pyggml.graph.tensor import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """The copies of a graph's streamed weights.

    before  node → the copies that begin right before it
    copies  (node, weight that it reads) → its copy
    """

    before: dict[Tensor, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    copies: dict[tuple[Tensor, Tensor], Tensor] = field(default_factory=dict)


def streams(graph: Graph, backends: Mapping[Tensor, Backend | None], ahead: int) -> Streams:
    """When copies begin. ahead: bytes that are copied before they are read, those of a block."""
    sent = Streams()
    for backend in {b: None for b in backends.values() if b is not None and b.streamed}:
        nodes = (t for t in graph.nodes if has_kernel(t) and backends[t] is backend)
        _enter(sent, nodes, backend.streamed or (), ahead)
    return sent


def _enter(
    sent: Streams, nodes: Iterable[Tensor], streamed: Collection[Tensor], ahead: int
) -> None:
    """The copies of one device."""
    starts = list[tuple[Tensor, int]]()  # first reader of each copy, bytes that were copied before
    last: dict[Tensor, tuple[Tensor, int]] = {}  # weight → its copy, bytes copied at its last use
    first, n_copied = 0, 0
    for t in nodes:
        for w in {s.root: None for s in t.src if s.root in streamed}:
            copy, at = last.get(w, (None, 0))
            if copy is None or n_copied - at > ahead:
                copy = Tensor(w.shape, w.dtype, STREAMED, (), {"leaf": w}, w.name)
                starts.append((t, n_copied))
                while n_copied - starts[first][1] > ahead:
                    first += 1
                sent.before[starts[first][0]].append(copy)
                n_copied += w.n_bytes
            last[w] = copy, n_copied
            sent.copies[t, w] = copy
