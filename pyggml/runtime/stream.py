"""Weights that stay with the host, and when each is copied to the device that reads it.

A copy is a node of the device's part: the plan gives it memory from there to its last reader. It
stands so far before its first reader that the copies in between are about a block's bytes; so a
device that runs nodes side by side copies the next block's weights while it computes with this
one's. A weight that is read again soon, as a block's in its own backward pass, is copied once for
all these readers.

    copy q₂ ─ q₁·x ─ copy k₂ ─ k₁·x ─ …  ─ q₂·x ─ …          memory: two blocks

Results can be parked: what is read again only after some blocks, as what a block gives is in the
backward pass, goes to the host as soon as it is made, and comes back as a weight does.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pyggml.backends import Backend
from pyggml.graph import Graph
from pyggml.graph.op import RETURNED, STREAMED, changed_by, has_kernel
from pyggml.graph.tensor import Tensor

_LONG = 4  # blocks whose weights are read meanwhile
_PART = 64  # of the largest of these results: smaller ones are not worth it


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """The copies of a graph's streamed weights and parked results.

    before  node → the copies that begin right before it
    copies  (node, weight or result that it reads) → its copy
    parked  result → its copy, once it is back
    """

    before: dict[Tensor, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    copies: dict[tuple[Tensor, Tensor], Tensor] = field(default_factory=dict)
    parked: dict[Tensor, Tensor] = field(default_factory=dict)


def streams(
    graph: Graph, backends: Mapping[Tensor, Backend | None], ahead: int, n_parked: int = 0
) -> Streams:
    """When copies begin. ahead: bytes that are copied before they are read, those of a block.
    n_parked: bytes of results that are parked, if there are as many; those made first are."""
    sent = Streams()
    for backend in {b: None for b in backends.values() if b is not None and b.streamed}:
        nodes = [t for t in graph.nodes if has_kernel(t) and backends[t] is backend]
        streamed = backend.streamed or ()
        late = dict[Tensor, Tensor]()
        read_late = _read_late(nodes, streamed, _LONG * ahead) if n_parked else []
        least = max((t.n_bytes for t, _ in read_late), default=0) // _PART
        for t, reader in read_late:
            large = t.n_bytes >= least and t not in graph.outputs
            if large and sum(s.n_bytes for s in late) < n_parked:
                late[t] = reader
        _enter(sent, nodes, streamed, late, ahead)
    return sent


def _read_late(
    nodes: Sequence[Tensor], streamed: Collection[Tensor], long: int
) -> list[tuple[Tensor, Tensor]]:
    """The results that nothing reads while so many bytes of weights are read, and the node that
    reads each first after that; in the order in which they are made."""
    changed = {root for t in nodes for root in changed_by(t)}
    last: dict[Tensor, int] = {}  # result → bytes of weights that were read until its last use
    late, n_read = dict[Tensor, Tensor](), 0
    for t in nodes:
        for s in {s.root: None for s in t.src}:
            if s in last and n_read - last[s] >= long:
                late.setdefault(s, t)
            if s in last:
                last[s] = n_read
            n_read += s.n_bytes * (s in streamed)
        for result in (t, *t.saved):
            if result.root is result and result not in changed:
                last[result] = n_read
    return [(t, late[t]) for t in last if t in late]


def _enter(
    sent: Streams,
    nodes: Sequence[Tensor],
    streamed: Collection[Tensor],
    late: Mapping[Tensor, Tensor],
    ahead: int,
) -> None:
    """The copies of one device. late: parked result → the node that reads it first once it is
    back."""
    starts = list[tuple[Tensor, int]]()  # first reader of each copy, bytes that were copied before
    last: dict[Tensor, tuple[Tensor, int]] = {}  # leaf → its copy, bytes copied at its last use
    first, n_copied = 0, 0
    for t in nodes:
        for s in {s.root: None for s in t.src}:
            if not (s in streamed or s in last or late.get(s) is t):
                continue
            copy, at = last.get(s, (None, 0))
            if copy is None or (s in streamed and n_copied - at > ahead):
                copy = Tensor(s.shape, s.dtype, STREAMED, (), {"leaf": s}, s.name)
                if s not in streamed:
                    copy = sent.parked[s] = Tensor(s.shape, s.dtype, RETURNED, (), {}, s.name)
                starts.append((t, n_copied))
                while n_copied - starts[first][1] > ahead:
                    first += 1
                sent.before[starts[first][0]].append(copy)
                n_copied += s.n_bytes
            last[s] = copy, n_copied
            sent.copies[t, s] = copy
