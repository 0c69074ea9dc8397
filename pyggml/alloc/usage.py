"""Memory in use while each node of a plan runs, and the tensors that hold it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyggml.alloc.lifetime import FOREVER
from pyggml.graph.op import SAVED, SHARED
from pyggml.graph.tensor import Tensor

if TYPE_CHECKING:  # which asks here for the peak
    from pyggml.alloc.plan import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """The arena while one node runs: the tensors alive, and the bytes of the node's scratch.

    A result that overwrites a source counts once, as the result.
    """

    node: Tensor
    index: int
    alive: tuple[Tensor, ...]
    n_scratch: int

    @property
    def n_bytes(self) -> int:
        return sum(t.n_bytes for t in self.alive) + self.n_scratch

    def by_kind(self) -> list[tuple[str, int, int]]:
        """(kind, count, bytes) of what is alive, largest first; scratch is a kind of its own."""
        kinds: Mapping[str, list[int]] = defaultdict(lambda: [0, 0])
        for t in self.alive:
            kind = kinds[_kind(t)]
            kind[0] += 1
            kind[1] += t.n_bytes
        if self.n_scratch:
            kinds[f"scratch of {self.node.op.name if self.node.op else ''}"][:] = 1, self.n_scratch
        rows = [(kind, n, n_bytes) for kind, (n, n_bytes) in kinds.items()]
        return sorted(rows, key=lambda row: -row[2])


def peak(plan: Plan) -> Moment:
    """The moment of highest use. The arena exceeds it only by the gaps between tensors."""
    used = bytes_at(plan)
    return moment(plan, max(range(len(used)), key=used.__getitem__))


def moment(plan: Plan, i: int) -> Moment:
    """What is alive while node i runs."""
    node = plan.graph.nodes[i]
    handed_on = {s for t, s in plan.reused.items() if plan.lives[t].first == i}
    alive = (
        t for t, life in plan.lives.items() if life.first <= i <= life.last and t not in handed_on
    )
    return Moment(node, i, tuple(alive), plan.n_scratch.get(node, 0))


def bytes_at(plan: Plan) -> list[int]:
    """Bytes in use while each node runs."""
    n = len(plan.graph.nodes)
    change = [0] * (n + 1)
    for t, life in plan.lives.items():
        n_bytes = t.n_bytes
        change[life.first] += n_bytes
        change[n if life.last == FOREVER else life.last + 1] -= n_bytes
    for t, source in plan.reused.items():
        i = plan.lives[t].first  # the source's memory is the result's from here on
        change[i] -= source.n_bytes
        change[i + 1] += source.n_bytes
    in_use, total = [], 0
    for i, node in enumerate(plan.graph.nodes):
        total += change[i]
        in_use.append(total + plan.n_scratch.get(node, 0))
    return in_use


_KINDS = 6  # of tensors in a table, the largest


def table(plan: Plan) -> str:
    """A plan in a dozen lines: how many results have memory and whose, the peak, what is alive
    then, largest first."""
    nodes, scratch = plan.graph.nodes, plan.n_scratch.values()
    views = sum(t.is_view for t in nodes)
    writes = sum(t.is_write for t in nodes)
    owners, reused = sum(t.op is not SHARED for t in plan.lives), len(plan.reused)
    lines = [
        f"{plan!r}",
        f"results   {owners} with memory: {owners - reused} their own, {reused} that of a source "
        "which dies",
        f"others    {views} views, {writes} writes over other tensors",
        f"scratch   of {len(scratch)} nodes, {max(scratch, default=0):,} bytes at most; "
        f"{len(plan.shared)} nodes share {len(set(plan.shared.values()))} more",
    ]
    if not nodes:
        return lines[0]
    at = peak(plan)
    name = at.node.name or (at.node.op.name if at.node.op else "")
    lines.append(
        f"peak      {at.n_bytes:,} bytes while node {at.index}, {name}, runs; gaps and "
        f"rounding up to cache lines take {plan.n_bytes - at.n_bytes:,}"
    )
    kinds = at.by_kind()
    if len(kinds) > _KINDS:
        rest = kinds[_KINDS - 1 :]
        n, n_bytes = sum(row[1] for row in rest), sum(row[2] for row in rest)
        kinds = [*kinds[: _KINDS - 1], (f"{len(rest)} kinds more", n, n_bytes)]
    lines.append(f"{'bytes':>14}  share     n  alive then")
    for kind, n, n_bytes in kinds:
        lines.append(f"{n_bytes:>14,} {n_bytes / (at.n_bytes or 1):>6.1%} {n:>5}  {kind}")
    return "\n".join(lines)


def _kind(t: Tensor) -> str:
    """Op, type and shape. A kernel's saved tensor counts under the kernel's op."""
    assert t.op is not None
    made_by = t.op.name
    if t.op in (SAVED, SHARED):
        made_by = f"{t.src[0].op.name if t.src[0].op else ''}, {t.op.name}"
    return f"{made_by} {t.dtype}{list(t.shape)}"
