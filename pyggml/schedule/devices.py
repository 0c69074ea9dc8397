"""Devices: the backends that share the work, and their copies of leaves.

A leaf's own memory is the host's. A device that reads it has a copy, which all programs share:

constant   over a read-only array, as a mapped weight is: copied once
held       weights, parameters, gradients, a cache: copied where a program reads them and their
           newest numbers lie elsewhere
others     inputs: the host may have written them, so they are copied in every run; what a run
           changes of them is copied back at its end
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary, WeakSet

from pyggml.backends import CPU, Backend, is_constant
from pyggml.dtypes import I8
from pyggml.op import SEEN
from pyggml.tensor import Tensor


class Devices:
    """Backends in the order in which they are preferred, and where the numbers of leaves lie.

    Where the host is the only backend nothing is ever copied.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.backends = tuple(backends)
        self.host: Backend = next((b for b in backends if b.is_host), CPU())
        self._copies: dict[Backend, WeakKeyDictionary[Tensor, Tensor]] = {
            b: WeakKeyDictionary() for b in backends if not b.is_host
        }
        self._newest: WeakKeyDictionary[Tensor, set[Backend]] = WeakKeyDictionary()
        self._held: WeakSet[Tensor] = WeakSet()
        self._said: set[tuple[str, str]] = set()

    # -- what stays on devices --------------------------------------------------------------------

    def hold(self, *leaves: Tensor) -> None:
        """Leave these where programs change them, from the numbers on that the host has now.

        Until `gather` the host's own arrays of them may be out of date; what is written there is
        not seen.
        """
        for root in {t.root: None for t in leaves}:
            self._newest[root] = {self.host}
            self._held.add(root)

    def gather(self, *leaves: Tensor) -> None:
        """Have the newest numbers of these in the host's arrays."""
        for t in leaves:
            self.fetch(t, self.host)

    @contextmanager
    def holding(self, *leaves: Tensor) -> Iterator[None]:
        """Inside, these are held; after it the host has their numbers."""
        self.hold(*leaves)
        try:
            yield
        finally:
            self.gather(*leaves)
            self._held -= set(leaves)

    # -- what programs ask for --------------------------------------------------------------------

    def copy_of(self, t: Tensor, backend: Backend) -> Tensor:
        """What a node on this backend reads for a leaf, or for a view of one: the same numbers in
        the same places of the backend's copy of the leaf."""
        if backend.is_host:
            return t
        copy = self._copies[backend].get(t.root)
        if copy is None:
            copy = self._copies[backend][t.root] = _memory_for(t.root, backend)
        if t is t.root:
            return copy
        return Tensor(
            t.shape, t.dtype, SEEN, (copy,), {}, t.name, t.strides, copy.root, t.offset
        )  # fmt: skip

    def fetch(self, leaf: Tensor, backend: Backend) -> None:
        """Have a leaf's newest numbers in this backend's memory."""
        taker = self.host if backend.is_host else backend
        newest = self._newest.setdefault(leaf, {self.host})
        if taker in newest:
            return
        giver = self.host if self.host in newest else next(iter(newest))
        values = giver.read(self.copy_of(leaf, giver))
        taker.write(self.copy_of(leaf, taker), values)
        newest.add(taker)
        let_go = giver.release(leaf) if is_constant(leaf) else None
        if let_go is not None:
            let_go()

    def changed(self, leaf: Tensor, backend: Backend) -> None:
        """A node on this backend has written into a leaf, whose other copies are old now."""
        self._newest[leaf] = {self.host if backend.is_host else backend}

    def begin(self, leaves: Iterable[Tensor]) -> None:
        """A run begins: what is not held is as the host has it."""
        for t in leaves:
            if t not in self._held:
                self._newest[t] = {self.host}

    def end(self, leaves: Iterable[Tensor]) -> None:
        """A run that has changed these leaves ends: the host gets what is not held."""
        self.gather(*(t for t in leaves if t not in self._held))

    def say_fallbacks(self, fallbacks: Iterable[tuple[str, str]]) -> None:
        """Warn, once for each, of the ops that a device leaves to those after it."""
        new: dict[str, list[str]] = {}
        for device, op in fallbacks:
            if (device, op) not in self._said:
                self._said.add((device, op))
                new.setdefault(device, []).append(op)
        names = [b.name for b in self.backends]
        for device, ops in new.items():
            later = " and ".join(names[names.index(device) + 1 :])
            message = f"{device} leaves {', '.join(sorted(ops))} to {later}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _memory_for(leaf: Tensor, backend: Backend) -> Tensor:
    """Memory on a device for a leaf's numbers, in the same places, its gaps included."""
    if leaf.is_contiguous:
        copy = Tensor(leaf.shape, leaf.dtype, name=leaf.name)
        backend.attach(copy, backend.alloc(copy.n_bytes), 0)
        return copy
    steps = zip(leaf.shape, leaf.strides, strict=True)
    owner = Tensor((leaf.dtype.block_bytes + sum((n - 1) * step for n, step in steps),), I8)
    backend.attach(owner, backend.alloc(owner.n_bytes), 0)
    return Tensor(
        leaf.shape, leaf.dtype, SEEN, (owner,), name=leaf.name, strides=leaf.strides, base=owner
    )
