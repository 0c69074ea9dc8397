"""What the backward pass keeps of the forward pass, and what it computes again.

A tensor that is not kept is cloned, with the same op on the same numbers, right before the backward
node that reads it first; what its clone reads is kept or cloned in turn. Clones give the same bits,
so gradients do not depend on what is kept; only memory and time do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from pyggml.graph import topological
from pyggml.tensor import SAVED, Tensor, next_place


class Keep(Enum):
    """Which results of the forward pass stay in memory until the backward pass has read them."""

    ALL = "all that it reads"
    COSTLY = "what is not cheap to compute again: norms, activations and rotations are"
    LAYERS = "the boundaries of layers; a layer is computed again when its backward pass begins"


class Recompute:
    """The clones of `dropped`, which are owners of memory; each is made when first asked for."""

    def __init__(self, dropped: set[Tensor]) -> None:
        self.dropped = dropped
        self._clones: dict[Tensor, Tensor] = {}

    def is_dropped(self, t: Tensor) -> bool:
        return t.op is not None and _maker(t).root in self.dropped

    def redirect(self, roots: Iterable[Tensor | None], after: int) -> list[Tensor | None]:
        """Let the nodes of these roots that were made later than place `after` read clones instead
        of what is dropped, and run after them; the roots, cloned where they are dropped."""
        found = list(roots)
        fresh = _later_than(after, [t for t in found if t is not None])
        for t in fresh:
            t.src = tuple(self._now(s) for s in t.src)
            if t.base is not None and self.is_dropped(t.base):
                t.base = self._now(t.base)
            t.place = next_place()
        return [None if t is None else self._now(t) for t in found]

    def _now(self, t: Tensor) -> Tensor:
        """What holds t's numbers during the backward pass."""
        if self.is_dropped(t) and t not in self._clones:
            self._clone(t)
        return self._clones.get(t, t)

    def _clone(self, wanted: Tensor) -> None:
        """Make the clones that `wanted` needs, oldest first."""
        needed, stack = set(), [wanted]
        while stack:
            t = stack.pop()
            if t not in needed and t not in self._clones and self.is_dropped(t):
                needed.add(t)
                stack.extend(t.src)
        for t in sorted(needed, key=lambda t: t.place):
            if t.op is not SAVED:
                self._copy(t)

    def _copy(self, t: Tensor) -> None:
        assert t.op is not None
        clone = t.op(*(self._clones.get(s, s) for s in t.src), **t.params).named(t.name)
        self._clones[t] = clone
        self._clones |= zip(t.saved, clone.saved, strict=True)


def dropped_by(keep: Keep, loss: Tensor, gradients: Sequence[Tensor]) -> set[Tensor]:
    """The owners of memory that need not be kept, given gradients that were built to read all."""
    if keep is Keep.ALL:
        return set()
    order = [t for t in topological(loss) if t.op is not None]
    dropped = _cheap(order, _read_by(gradients, set(order)))
    if keep is Keep.LAYERS:
        dropped |= _inside_layers(order)
    return dropped - _pinned(order, loss)


def _later_than(place: int, roots: Sequence[Tensor]) -> list[Tensor]:
    """The roots, and what they are made of, that are younger than a place; oldest first."""
    found: set[Tensor] = set()
    stack = list(roots)
    while stack:
        t = stack.pop()
        if t.place > place and t.op is not None and t not in found:
            found.add(t)
            stack.extend(t.src)
    return sorted(found, key=lambda t: t.place)


def _maker(t: Tensor) -> Tensor:
    """The node whose kernel writes t."""
    return t.src[0] if t.op is SAVED else t


def _pinned(order: Sequence[Tensor], loss: Tensor) -> set[Tensor]:
    """Never dropped: the result, boundaries, what reads or writes memory that a node changes."""
    changed = {t.root for t in order if t.base is not None and not t.is_view}
    around = {t.root for t in order if any(s.root in changed for s in t.src)}
    return {loss.root} | changed | around | {t.root for t in order if t.boundary}


def _read_by(gradients: Sequence[Tensor], forward: set[Tensor]) -> set[Tensor]:
    """The owners among the forward nodes that backward nodes read."""
    nodes = (t for t in topological(*gradients) if t not in forward and t.op is not SAVED)
    return {s.root for t in nodes for s in t.src}


def _cheap(order: Sequence[Tensor], read: set[Tensor]) -> set[Tensor]:
    """Owners that a cheap op makes of what is there anyway, or is cheap itself."""
    again: set[Tensor] = set()
    for t in order:
        there = (s.root.op is None or s.root in read or s.root in again for s in t.src)
        if t.base is None and t.op is not None and t.op.needs.cheap and all(there):
            again.add(t)
    return again


def _inside_layers(order: Sequence[Tensor]) -> set[Tensor]:
    """Owners on a way from one boundary to another."""
    behind: set[Tensor] = set()
    for t in order:
        if any(s.boundary or s in behind for s in t.src):
            behind.add(t)
    before: set[Tensor] = set()
    for t in reversed(order):
        if t.boundary or t in before:
            before.update(t.src)
    return {t for t in behind & before if t.base is None}
