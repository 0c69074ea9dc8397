"""Devices: the backends that share the work, and their copies of leaves.

A leaf's own memory is the host's. Any other device that reads it has one copy for all programs:

constant   a read-only array, such as a mapped weight: copied once
held       weights, parameters, gradients, a cache: copied when a program reads them, if their
           newest numbers are on another device
others     inputs, which the host may have written: copied in every run; changes made by the run
           are copied back at its end
"""

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import filterfalse
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from pyggml.backends import Backend
from pyggml.backends.cpu import CPU
from pyggml.graph.arrays import array, detach
from pyggml.graph.call import Call
from pyggml.graph.dtypes import I8
from pyggml.graph.op import SEEN
from pyggml.graph.tensor import Tensor


class Devices:
    """Backends in order of preference, and the device of each leaf's newest numbers.

    With the host as the only backend nothing is ever copied.

    homes     group of leaves, such as a block's → the device that computes what reads one of them,
              if it can (runtime/place.py); empty where the order of preference alone decides
    first     the device of what reads no such leaf, and nothing that is computed
    ahead     bytes of streamed leaves that are copied before they are read (runtime/stream.py)
    parked    bytes of results, at least, that lie with the host while nothing reads them for long
    n_moves   grows when a leaf is held or let go, and when a device gets, or no longer has, the
              newest numbers of a held one
    """

    def __init__(self, backends: Sequence[Backend] = ()) -> None:
        """backends: in order of preference; by default the host alone, in float32."""
        self.host: Backend = next((b for b in backends if b.is_host), CPU())
        self.backends = tuple(backends) or (self.host,)
        self._copies: dict[Backend, WeakKeyDictionary[Tensor, Tensor]] = {
            b: WeakKeyDictionary() for b in backends if not b.is_host
        }
        self._placed: WeakSet[Tensor] = WeakSet()  # the copies that have memory
        self._newest: WeakKeyDictionary[Tensor, set[Backend]] = WeakKeyDictionary()
        self._held: WeakSet[Tensor] = WeakSet()
        self._groups: WeakKeyDictionary[Tensor, Hashable] = WeakKeyDictionary()
        self.homes: Mapping[Hashable, Backend] = {}
        self.first = self.backends[0]
        self.ahead = self.parked = 0
        self.n_moves = 0
        self._said: set[tuple[str, str]] = set()

    @property
    def beside_host(self) -> Sequence[Backend]:
        """The devices beside the host, in their order."""
        return [*self._copies]

    @property
    def have_copies(self) -> bool:
        """Whether there is a device beside the host."""
        return bool(self._copies)

    def group(self, group: Hashable, *leaves: Tensor) -> None:
        """Note that these leaves belong to a group, a key of `homes`; None: to none."""
        for root in _roots(leaves) if group is not None else ():
            self._groups[root] = group

    def home(self, leaf: Tensor) -> Backend | None:
        """Where what reads a leaf is computed; None if the leaf does not decide it."""
        return self.homes.get(self._groups.get(leaf))

    # -- what stays on devices --------------------------------------------------------------------

    def hold(self, *leaves: Tensor) -> None:
        """Keep these leaves on the devices that change them, starting from the host's numbers.

        Until `gather` the host's arrays of them may be out of date, and writes to those are not
        seen.
        """
        for root in _roots(leaves):
            self._newest[root] = {self.host}
            self._held.add(root)
        self.n_moves += 1

    def holds(self, leaf: Tensor) -> bool:
        """Whether a leaf is held."""
        return leaf in self._held

    def gather(self, *leaves: Tensor) -> None:
        """Copy the newest numbers of these leaves into the host's arrays."""
        for root in _roots(leaves):
            self.fetch(root, self.host)

    def drop(self, *leaves: Tensor) -> None:
        """Free the copies of leaves that nobody will read any more, on all devices but the host."""
        for root in _roots(leaves):
            for copies in self._copies.values():
                if root in copies:
                    detach(copies.pop(root))
            self._newest.pop(root, None)
            self._held.discard(root)
        self.n_moves += 1

    @contextmanager
    def holding(self, *leaves: Tensor) -> Iterator[None]:
        """A context in which these leaves are held; at its end the host has their numbers."""
        self.hold(*leaves)
        try:
            yield
        finally:
            self.gather(*leaves)
            self._held -= set(_roots(leaves))
            self.n_moves += 1

    # -- what programs ask for --------------------------------------------------------------------

    def copy_of(self, t: Tensor, backend: Backend) -> Tensor:
        """This backend's copy of a leaf, or of a view of one, for a node to read.

        The copy has the leaf's offsets and strides.
        """
        if backend.is_host:
            return t
        copy = self.planned_copy(t, backend)
        if copy.root not in self._placed:
            backend.attach(copy.root, backend.alloc(copy.root.n_bytes), 0)
            self._placed.add(copy.root)
        return copy

    def planned_copy(self, t: Tensor, backend: Backend) -> Tensor:
        """The same, which may have no memory yet: a plan takes none."""
        if backend.is_host:
            return t
        copy = self._copies[backend].get(t.root)
        if copy is None:
            copy = self._copies[backend][t.root] = _laid_out(t.root)
        if t is t.root:
            return copy
        return Tensor(
            t.shape, t.dtype, SEEN, (copy,), {}, t.name, t.strides, copy.root, t.offset
        )  # fmt: skip

    def has_memory(self, backend: Backend) -> Callable[[Tensor], bool]:
        """Whether a leaf is one that nodes of this backend may read: the host's, or its copy."""
        copies = {b: {t.root for t in of.values()} for b, of in self._copies.items()}
        if not backend.is_host:
            return lambda leaf: leaf.root in copies[backend]
        elsewhere = set[Tensor]().union(*copies.values())
        return lambda leaf: leaf.root not in elsewhere

    def fetch(self, leaf: Tensor, backend: Backend) -> None:
        """Copy a leaf's newest numbers into this backend's memory."""
        taker = self.host if backend.is_host else backend
        newest = self._newest.setdefault(leaf, {self.host})
        if taker in newest:
            return
        giver = self.host if self.host in newest else next(iter(newest))
        values = giver.read(self.copy_of(leaf, giver))
        taker.write(self.copy_of(leaf, taker), values)
        newest.add(taker)
        self.n_moves += self.holds(leaf)

    def load(self, leaves: Iterable[Tensor], backend: Backend) -> None:
        """Copy constant leaves, which the host has, into this backend's memory, all together."""
        if backend.is_host:
            return
        new = [t for t in leaves if backend not in self._newest.setdefault(t, {self.host})]
        copies = [self.planned_copy(t, backend) for t in new]
        roots = [r for r in dict.fromkeys(c.root for c in copies) if r not in self._placed]
        if roots:
            backend.place(roots)
            self._placed.update(roots)
        backend.load(self._let_go(new, copies))
        for leaf in new:
            self._newest[leaf].add(backend)
            self.n_moves += self.holds(leaf)

    def _let_go(
        self, leaves: Sequence[Tensor], copies: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, np.ndarray]]:
        """Copies, and the host's arrays of them, whose pages are released as the next is asked
        for: a device that goes on copying meanwhile takes no longer."""
        for leaf, copy in zip(leaves, copies, strict=True):
            yield copy, array(leaf)
            if (let_go := self.host.release(leaf)) is not None:
                let_go()

    def bind_write(self, leaf: Tensor, backend: Backend) -> Call | None:
        """A call that copies the host's numbers of a leaf to this backend; None to the host's."""
        if backend.is_host:
            return None
        return backend.bind_write(self.copy_of(leaf, backend), array(leaf))

    def note_change(self, leaf: Tensor, backend: Backend) -> None:
        """Note that this backend has written into a leaf: all other copies are out of date."""
        newest = {self.host if backend.is_host else backend}
        if self._newest.get(leaf) != newest:
            self._newest[leaf] = newest
            self.n_moves += self.holds(leaf)

    def begin(self, leaf: Tensor) -> None:
        """Start of a run: the host's numbers are the newest of a leaf that is not held."""
        if not self.holds(leaf):
            self._newest[leaf] = {self.host}

    def end(self, leaf: Tensor) -> None:
        """End of a run that changed a leaf: if it is not held, it is copied back to the host."""
        if not self.holds(leaf):
            self.fetch(leaf, self.host)

    def say_fallbacks(self, fallbacks: Iterable[tuple[str, str]]) -> None:
        """Warn, once for each, of ops that a device leaves to a later one."""
        new: dict[str, list[str]] = {}
        for device, op in fallbacks:
            if (device, op) not in self._said:
                self._said.add((device, op))
                new.setdefault(device, []).append(op)
        names = [b.name for b in self.backends]
        for device, ops in new.items():
            at = names.index(device)
            later = " and ".join(names[at + 1 :] or names[:at])
            message = f"{device} leaves {', '.join(sorted(ops))} to {later}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)


class ForEach:
    """Does something about each of some leaves whenever it is called.

    Held leaves, most of them caches and parameters, are left out while none of them has moved: once
    it is done, to do it again changes nothing.
    """

    def __init__(
        self,
        devices: Devices,
        act: Callable[[Tensor], None],
        leaves: Iterable[Tensor],
        of_others: Callable[[Tensor], Callable[[], None] | None] | None = None,
    ) -> None:
        """of_others: tells, of a leaf that is not held, what to do instead in every call, if
        anything."""
        self._devices, self._act, self._leaves = devices, act, tuple(leaves)
        self._of_others = of_others or partial(partial, act)
        self._others: tuple[Callable[[], None], ...] = ()  # for those that are not held
        self._n_moves = -1  # when they were last told apart

    def __call__(self) -> None:
        if self._n_moves != self._devices.n_moves:
            for t in filter(self._devices.holds, self._leaves):
                self._act(t)
            elsewhere = filterfalse(self._devices.holds, self._leaves)
            self._others = tuple(call for t in elsewhere if (call := self._of_others(t)))
            self._n_moves = self._devices.n_moves
        for call in self._others:
            call()


def _roots(leaves: Iterable[Tensor]) -> dict[Tensor, None]:
    """The leaves that have the memory of these, each once: some are windows of another."""
    return {t.root: None for t in leaves}


def _laid_out(leaf: Tensor) -> Tensor:
    """A device's copy of a leaf, without memory, laid out as on the host: with the same gaps."""
    if leaf.is_contiguous:
        return Tensor(leaf.shape, leaf.dtype, name=leaf.name)
    steps = zip(leaf.shape, leaf.strides, strict=True)
    owner = Tensor((leaf.dtype.block_bytes + sum((n - 1) * step for n, step in steps),), I8)
    return Tensor(
        leaf.shape, leaf.dtype, SEEN, (owner,), name=leaf.name, strides=leaf.strides, base=owner
    )
