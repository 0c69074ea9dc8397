"""The gradient of a step: those of its batches, each computed from 0, then added in their order.

g = 0 + g₁ + g₂ + … + gₙ     of n batches; g₁ where n is 1

The sum does not depend on which rank computed which batch, so neither does the run. Of several
ranks each adds one part of all gradients, and the parts are joined: from card to card where there
are ways between them, else through the host.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import numpy as np

from pyggml.backends import Backend, Links
from pyggml.graph import Graph
from pyggml.graph.arrays import array, write
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import Tensor, window, zeros
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.config import TrainConfig
from pyggml.lora.ranks import ALONE, Ranks, share
from pyggml.lora.ranks.linked import links_to_ranks
from pyggml.ops import add_inplace, cpy, fill_inplace
from pyggml.runtime import Devices, Program, bind, schedule


def n_gradients(config: TrainConfig, ranks: Ranks = ALONE, on_card: bool = False) -> float:
    """Buffers as long as the parameters that their gradient and its sum take. on_card: of several
    ranks, where each has a card."""
    return int(not config.step_in_backward) + _n_sums(config, ranks, on_card)


def _n_sums(config: TrainConfig, ranks: Ranks, on_card: bool) -> float:
    n = config.grad_accum
    if ranks.size == 1:
        return int(n > 1)
    if on_card:  # kept before the last one, received parts, and a part of the sum
        return -(-n // ranks.size) - 1 + (n + 1) / ranks.size
    return 3 * (n // ranks.size + 1)  # kept, sent and received


class StepGradient:
    """The buffer `gradient` of some parameters, as the sum of a step's batches. All ranks make
    one.

    groups: parts of the buffer that batches come to one after the other, if passes overlap
    """

    def __init__(
        self,
        parameters: Parameters,
        devices: Devices,
        ranks: Ranks,
        groups: Sequence[Sequence[Tensor]] = (),
    ) -> None:
        parts = parameters.buffers["gradient"]
        groups, sums = groups or [parts], list[_Sum]()
        if ranks.size == 1:
            totals = dict(zip(parts, parameters.buffers["total"], strict=True))
            sums += [_SumAlone({t: totals[t] for t in each}, devices) for each in groups]
        elif (way := links_to_ranks(devices, ranks)) is not None:
            groups, sums = [parts], [_SumOnDevices(parts[0], devices, ranks, *way)]
        else:  # a group without gradients has nothing to send
            sums += [_SumOnHost(e, devices, ranks) if e else _SumAlone({}, devices) for e in groups]
        portions = zip(sums, groups, strict=True)
        self._portions = [_Portion(total, parameters, devices, each) for total, each in portions]

    def begin(self) -> None:
        """Begin a step: the gradient is 0, or will be for the next pass."""
        for portion in self._portions:
            portion.begin()

    def next(self, i: int | None = None) -> None:
        """Begin a batch, whose backward pass adds its gradient to 0; i: in this group alone."""
        for portion in self._portions if i is None else [self._portions[i]]:
            portion.next()

    def end(self, n: int) -> None:
        """Make the buffer the sum over a step's n batches, of all ranks."""
        self.begin_sum(n)
        self.wait()

    def begin_sum(self, n: int) -> None:
        """The same as work of a device, which may still compute the batches; `wait` follows."""
        for portion in self._portions:
            portion.total.begin(portion.n, n)

    def wait(self) -> None:
        """Wait until the ranks have each other's numbers."""
        for portion in self._portions:
            portion.total.wait()

    def give_up(self) -> None:
        """Wait for no other rank any more: one has failed, or does not come."""
        for portion in self._portions:
            portion.total.give_up()


class _Portion:
    """A part of the buffer, in which a batch's gradient is made in one go."""

    def __init__(
        self, total: "_Sum", parameters: Parameters, devices: Devices, parts: Sequence[Tensor]
    ) -> None:
        self.total, self.n = total, 0  # batches of this rank so far
        self._zero = _zero(parameters, devices, parts)

    def begin(self) -> None:
        self.n = 0
        self._zero()

    def next(self) -> None:
        if self.n:
            self.total.keep(self.n - 1)
            self._zero()
        self.n += 1


def _zero(parameters: Parameters, devices: Devices, parts: Sequence[Tensor]) -> Callable[[], None]:
    """What has the gradient count as 0: zeros, or on the host alone a word that the next pass
    reads, which then writes over what is there."""
    if not devices.have_copies:
        return partial(write, parameters.keeps, 0.0)
    return _bound(devices, *(fill_inplace(gradient, 0.0) for gradient in parts))


class _Sum(ABC):
    """How the gradients of a step's batches are added."""

    @abstractmethod
    def keep(self, i: int) -> None:
        """Keep the gradient of this rank's batch i, which is not its last one."""

    @abstractmethod
    def begin(self, mine: int, n: int) -> None:
        """Begin to make the gradient the sum of n, of which this rank has `mine`, with the last
        one."""

    def wait(self) -> None:  # noqa: B027  # links alone have to be waited for
        """Wait for what other ranks send."""

    def give_up(self) -> None:  # noqa: B027  # links alone have to be waited for
        """Do not wait for it."""


class _SumAlone(_Sum):
    """Of one process, where the parameters are. The sums have memory there from the first step
    on that has several batches. totals: of each gradient."""

    def __init__(self, totals: Mapping[Tensor, Tensor], devices: Devices) -> None:
        self._totals, self._devices = totals, devices

    @cached_property
    def _programs(self) -> tuple[Program, Program, Program, Program]:
        """Make the sums 0; add gradients to them; add them to gradients; make gradients 0."""
        pairs, bound = self._totals.items(), partial(_bound, self._devices)
        return (
            bound(*(fill_inplace(total, 0.0) for total in self._totals.values())),
            bound(*(add_inplace(total, gradient) for gradient, total in pairs)),
            bound(*(add_inplace(gradient, total) for gradient, total in pairs)),
            bound(*(fill_inplace(gradient, 0.0) for gradient in self._totals)),
        )

    def keep(self, i: int) -> None:
        zero, add, *_ = self._programs
        if i == 0:
            zero()
        add()

    def begin(self, mine: int, n: int) -> None:
        if n != 1:  # of no batch, no pass has written the gradient
            self._programs[2 if n else 3]()


class _SumOnHost(_Sum):
    """Of several ranks, by their exchange of arrays."""

    def __init__(self, parts: Sequence[Tensor], devices: Devices, ranks: Ranks) -> None:
        self._parts, self._devices, self._ranks = parts, devices, ranks
        self._kept: list[np.ndarray] = []

    def keep(self, i: int) -> None:
        self._devices.gather(*self._parts)
        self._kept[i:] = [np.concatenate([array(part) for part in self._parts])]

    def begin(self, mine: int, n: int) -> None:
        if mine:
            self.keep(mine - 1)
        ends = np.cumsum([part.n_elements for part in self._parts])
        total = self._ranks.add(self._kept[:mine], n, int(ends[-1]))
        for part, numbers in zip(self._parts, np.split(total, ends), strict=False):
            array(part)[:] = numbers
            self._devices.note_change(part, self._devices.host)
        self._kept = []


_Ways = list[tuple[int, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class _Round:
    """How the ranks of a step of n batches add their gradients.

    parts     what goes to each rank, and comes: parts of gradients, of which one is summed here
    received  all of those that come, in the order of the batches
    add       adds them
    sums      what goes to each rank, and comes: the sums, in place of the gradient
    """

    parts: tuple[_Ways, _Ways]
    received: Tensor
    add: Program
    sums: tuple[_Ways, _Ways]


class _SumOnDevices(_Sum):
    """Of several ranks, from card to card: no gradient is ever with the host."""

    def __init__(
        self, gradient: Tensor, devices: Devices, ranks: Ranks, device: Backend, links: Links
    ) -> None:
        self._gradient, self._devices, self._device = gradient, devices, device
        self._ranks, self._links = ranks, links
        ends = [gradient.n_elements * i // ranks.size for i in range(ranks.size + 1)]
        self._parts = [*pairwise(ends)]
        self._kept: list[tuple[Tensor, Program]] = []
        self._rounds: dict[int, _Round] = {}

    def keep(self, i: int) -> None:
        if i == len(self._kept):
            kept = self._leaf(self._gradient.n_elements)
            self._kept.append((kept, _bound(self._devices, cpy(self._gradient, kept))))
        self._kept[i][1]()

    def begin(self, mine: int, n: int) -> None:
        if n not in self._rounds:
            self._rounds[n] = self._round(mine, n)
        of_step = self._rounds[n]
        self._devices.fetch(self._gradient, self._device)
        self._links.exchange(*of_step.parts)
        self._devices.note_change(of_step.received, self._device)
        of_step.add()
        self._links.exchange(*of_step.sums)
        self._devices.note_change(self._gradient, self._device)

    def wait(self) -> None:
        self._links.wait(self._ranks.look)

    def give_up(self) -> None:
        self._links.cut()

    def _round(self, mine: int, n: int) -> "_Round":
        first, end = self._parts[self._ranks.rank]
        here = end - first
        received, total = self._leaf(n * here), self._leaf(here)
        own = [kept for kept, _ in self._kept[: mine - 1]] + [self._gradient] if mine else []
        shares = [share(n, rank, self._ranks.size) for rank in range(self._ranks.size)]
        sent = [(r, self._part(t, *part)) for r, part in enumerate(self._parts) for t in own]
        places = [(r, i * here) for r, batches in enumerate(shares) for i in batches]
        parts = sent, [(r, self._part(received, at, at + here)) for r, at in places]
        whole = [(r, self._part(self._gradient, *part)) for r, part in enumerate(self._parts)]
        sums = [(r, self._part(total, 0, here)) for r in range(self._ranks.size)], whole
        return _Round(parts, received, self._adder(received, total, n), sums)

    def _part(self, leaf: Tensor, first: int, end: int) -> Tensor:
        return self._devices.copy_of(window(leaf, first, (end - first,)), self._device)

    def _adder(self, received: Tensor, total: Tensor, n: int) -> Program:
        """What adds up n gradients' parts in their order."""
        here = total.n_elements
        parts = [window(received, i * here, (here,)) for i in range(n)]
        if n == 1:
            return _bound(self._devices, cpy(parts[0], total))
        node = fill_inplace(total, 0.0)
        for part in parts:
            node = add_inplace(node, part)
        return _bound(self._devices, node)

    def _leaf(self, n: int) -> Tensor:
        """Numbers that this device alone has."""
        leaf = zeros((n,), F32)
        self._devices.hold(leaf)
        self._devices.note_change(leaf, self._device)
        return leaf


def _bound(devices: Devices, *nodes: Tensor) -> Program:
    return bind(schedule(Graph.of(*nodes), devices))
