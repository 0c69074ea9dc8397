"""What the backward pass keeps of the forward pass, and what it computes again.

A tensor that is not kept is cloned, with the same op on the same numbers, right before the backward
node that reads it first; what its clone reads is kept or cloned in turn. Clones give the same bits,
so gradients do not depend on what is kept; only memory and time do.

Of a tensor with a stand-in the backward pass reads only that, made float32 again, and what cheap
ops make of it is made of that too. So the tensor itself is gone when the forward pass has read it,
and a layer that is computed again makes the stand-in again, of the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from pyggml.dtypes import F32
from pyggml.graph import topological
from pyggml.op import SAVED
from pyggml.ops import cpy
from pyggml.tensor import Tensor, next_place


class Keep(Enum):
    """Which results of the forward pass stay in memory until the backward pass has read them."""

    ALL = "all that it reads"
    COSTLY = "what is not cheap to compute again: norms, activations and rotations are"
    LAYERS = "the boundaries of layers; a layer is computed again when its backward pass begins"


class Recompute:
    """What the backward pass reads instead of some owners of memory, made when first asked for.

    dropped   are not kept: clones
    rounded   have a stand-in or are made of such: what has been rounded, and is made of it
    """

    def __init__(self, dropped: set[Tensor], rounded: set[Tensor]) -> None:
        self.dropped, self.rounded = dropped, rounded
        self._clones: dict[Tensor, Tensor] = {}
        self._of_rounded: dict[Tensor, Tensor] = {}

    def is_dropped(self, t: Tensor) -> bool:
        return t.op is not None and _maker(t).root in self.dropped

    def redirect(self, roots: Iterable[Tensor | None], after: int) -> list[Tensor | None]:
        """Let the nodes of these roots that were made later than place `after` read what stands for
        their sources, and run after it; the roots, or what stands for them."""
        found = list(roots)
        fresh = _later_than(after, [t for t in found if t is not None])
        for t in fresh:
            t.src = tuple(self._now(s) for s in t.src)
            if t.base is not None:
                t.base = self._now(t.base)
            t.place = next_place()
        return [None if t is None else self._now(t) for t in found]

    def _now(self, t: Tensor) -> Tensor:
        """What the backward pass reads for t."""
        if t.root not in self.rounded:
            return self._exact(t)
        if t not in self._of_rounded:
            self._of_rounded[t] = self._round(t).named(t.name)
        return self._of_rounded[t]

    def _round(self, t: Tensor) -> Tensor:
        if t.stand_in is None:
            assert t.op is not None
            return t.op(*(self._now(s) for s in t.src), **t.params)
        stand_in = self._exact(t).stand_in
        assert stand_in is not None
        return cpy(stand_in, F32)

    def _exact(self, t: Tensor) -> Tensor:
        """What holds t's own numbers during the backward pass."""
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
        if t.stand_in is not None:
            clone.stand_in = cpy(clone, t.stand_in.dtype)


def recompute(keep: Keep, loss: Tensor, gradients: Sequence[Tensor]) -> Recompute:
    """What is not kept, and what is read rounded, given gradients built to read all as it is."""
    order = [t for t in topological(loss) if t.op is not None]
    pinned = _pinned(order, loss)
    cheap = _cheap(order, _read_by(gradients, set(order))) - pinned
    dropped = set() if keep is Keep.ALL else cheap
    if keep is Keep.LAYERS:
        dropped = cheap | (_inside_layers(order) - pinned)
    return Recompute(dropped, _rounded(order, cheap, pinned))


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
        if t.base is None and t.op is not None and t.op.cheap and all(there):
            again.add(t)
    return again


def _rounded(order: Sequence[Tensor], cheap: set[Tensor], pinned: set[Tensor]) -> set[Tensor]:
    """Owners with a stand-in, and what is cheap to make of those; whatever `keep` says, so that it
    changes no bit."""
    rounded: set[Tensor] = set()
    for t in order:
        made_of = t in cheap and any(s.root in rounded for s in t.src)
        if made_of or (t.stand_in is not None and t not in pinned):
            rounded.add(t)
    return rounded


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
