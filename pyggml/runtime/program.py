"""Schedule → numbers: every kernel is bound to its memory once, then parts and copies run in order.

program = bind(schedule(Graph.of(loss), devices))
program()
program.read(loss)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from types import MappingProxyType
from typing import Any

import numpy as np

from pyggml.alloc import Plan
from pyggml.backends import Backend
from pyggml.backends.cpu.pages import map_of
from pyggml.errors import GraphError
from pyggml.graph import Graph, last_write
from pyggml.graph.arrays import LeafArrays, array, expect_held, is_constant, leaf_arrays
from pyggml.graph.call import Call
from pyggml.graph.op import RETURNED, SENT, STREAMED, changed_by
from pyggml.graph.tensor import Tensor
from pyggml.jit.tasks import shared_extents
from pyggml.runtime.calls import attach, kernel_calls, parked_bytes
from pyggml.runtime.devices import Devices, ForEach
from pyggml.runtime.schedule import Schedule, schedule
from pyggml.runtime.split import DevicePart


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A schedule with memory.

    arenas    of each device, the memory of its plan
    kernels   of each device: node → its kernel, bound
    calls     kernels, which devices may have joined, and copies, in the order of execution
    of_parts  the same by parts of the schedule
    leaves    the graph's leaves, and the arrays that the kernels are bound to
    """

    schedule: Schedule
    arenas: Mapping[Backend, Any]
    kernels: Mapping[Backend, Mapping[Tensor, Call]]
    calls: tuple[Call, ...]
    of_parts: tuple[tuple[Call, ...], ...]
    leaves: LeafArrays

    def __call__(self) -> None:
        """Compute every output of the graph; on the host, nothing is allocated.

        GraphError for a leaf that was given another array since: kernels read the one of `bind`.
        Where a device computes, leaves are looked at meanwhile.
        """
        is_alone = not self.schedule.devices.have_copies
        if is_alone:
            expect_held(self.leaves)
        for call in self.calls:
            call.kernel(*call.arguments)
        if not is_alone:
            expect_held(self.leaves)

    def start(self, i: int) -> None:
        """Run part i alone, after those before it; devices need not be done when this returns."""
        if i == 0:
            expect_held(self.leaves)
        for call in self.of_parts[i]:
            call.kernel(*call.arguments)

    def read(self, t: Tensor) -> np.ndarray:
        """A copy of an output's numbers, from the device that computed it.

        They stay until the next run of a program in the same memory. Another program may be bound
        over the same nodes meanwhile: each reads its own memory.
        """
        return self.begin_read(t)()

    def begin_read(self, t: Tensor) -> Callable[[], np.ndarray]:
        """Begin to read an output, as Backend.begin_read: what this run made, given later."""
        if t.root.op is None:
            devices = self.schedule.devices
            devices.gather(t.root)
            return devices.host.begin_read(t)
        twin, home, offset = self.schedule.place(t)
        home.attach(twin.root, self.arenas[home], offset)
        return home.begin_read(twin)

    def walk(self) -> Iterator[tuple[Tensor, Backend]]:
        """Run node by node; yields each node after it has run, with the device that has its result.

        Meant for looking for a fault: a result stays readable until its memory is used again.
        """
        for backend, plan in self.schedule.plans.items():
            attach(plan, self.arenas[backend])
        for part, node, call in _steps(self.schedule, self.kernels):
            call()
            if node is not None and node.op not in (STREAMED, SENT, RETURNED):
                yield node, part.backend


_LINE = 64  # bytes, to which memory is aligned


class Arenas:
    """Memory on every device, as much as the largest program needs: one program runs at a time.

    made: schedules whose programs are to share it. If a larger one comes later, earlier programs
    keep the memory that they have.
    """

    def __init__(self, *schedules: Schedule) -> None:
        self._held: dict[Backend, tuple[int, Any]] = {}
        self._parked: dict[Backend, np.ndarray] = {}
        plans = [p for each in schedules for p in each.plans.values()]
        for backend in dict.fromkeys(p.backend for p in plans):
            self.of(backend, max(p.n_bytes for p in plans if p.backend is backend))

    def of(self, backend: Backend, n_bytes: int) -> Any:
        """n_bytes or more of a device. If it must grow, it grows to twice its size at least."""
        held = self._held.get(backend, (0, None))
        if held[1] is None or held[0] < n_bytes:
            n = max(n_bytes, 2 * held[0])
            held = self._held[backend] = n, backend.alloc(n)
        return held[1]

    def memory_of_parked(self, p: Plan) -> np.ndarray | None:
        """Memory of the host for the results that a plan parks there; None if there are none."""
        n = parked_bytes(p)
        if n and (p.backend not in self._parked or self._parked[p.backend].size < n):
            self._parked[p.backend] = p.backend.host_memory(n)
        return self._parked[p.backend] if n else None

    def beside(self, shared: Collection[Backend]) -> Arenas:
        """Further memory for programs that run among those of this; of some devices the same."""
        more = Arenas()
        more._held = {b: held for b, held in self._held.items() if b in shared}
        return more

    def split(self, backend: Backend, n_bytes: int) -> tuple[Arenas, Any]:
        """Arenas of this memory without the last n_bytes that the host has; and these, which last
        until a program runs in all of it. It has as many already."""
        n, arena = self._held[backend]
        first = (n - n_bytes) // _LINE * _LINE
        rest = Arenas()
        rest._held = {**self._held, backend: (first, arena[:first])}
        return rest, arena[first : first + n_bytes]


def bind(schedule: Schedule, release: bool = False, arenas: Arenas | None = None) -> Program:
    """Take memory on every device, bind every kernel call, and copy the constants.

    release: after each node, free the pages of the weights that the host read from a file. This
    pays where each read serves many tokens.
    arenas: memory that programs share: the outputs of one last until another one runs. Without,
    the program has its own. Raises PyggmlError, naming op and tensor, for a node that its device
    does not support; GraphError for what is no schedule, and for a node that writes into a leaf
    over a read-only array.
    """
    if not isinstance(schedule, Schedule):
        raise GraphError(f"bind takes a schedule, as bind(schedule(graph)); found {schedule!r}")
    _refuse_read_only(schedule)
    for graph in (schedule.graph, *(p.graph for p in schedule.plans.values())):
        graph.forget()  # all is planned
    memory = arenas or Arenas()
    of_devices = {backend: memory.of(backend, p.n_bytes) for backend, p in schedule.plans.items()}
    for part in schedule.parts:
        schedule.devices.load(filter(is_constant, part.leaves), part.backend)
        for leaf in part.leaves:
            schedule.devices.copy_of(leaf, part.backend)
    plans = schedule.plans.items()
    with shared_extents():
        kernels = {b: kernel_calls(p, of_devices[b], memory.memory_of_parked(p)) for b, p in plans}
    after = _watching(schedule, of_devices)
    for part in schedule.parts if release else ():
        for node in part.nodes:
            after[node] += _releasing(node, part.backend)
    calls: dict[DevicePart, list[Call]] = {part: [] for part in schedule.parts}
    for (part, are_kernels), steps in groupby(_steps(schedule, kernels, after), _kind):
        calls_of_run = [call for _, _, call in steps]
        calls[part] += part.backend.join(calls_of_run) if are_kernels else calls_of_run
    if schedule.parts:
        calls[schedule.parts[-1]] += map(Call, _checks_of_files(schedule))
    of_parts = tuple(map(tuple, calls.values()))
    leaves = leaf_arrays(schedule.graph.leaves)
    return Program(schedule, of_devices, kernels, tuple(chain(*of_parts)), of_parts, leaves)


def _checks_of_files(schedule: Schedule) -> list[Callable[[], None]]:
    """What raises an error if a file was changed whose weights were read where they lie."""
    leaves = [leaf for part in schedule.parts if part.backend.is_host for leaf in part.leaves]
    nodes = (t for part in schedule.parts for t in part.nodes)
    leaves += (t.params["leaf"] for t in nodes if t.op is STREAMED)
    maps = {id(m): m for leaf in leaves if (m := map_of(array(leaf))) is not None}
    return [m.check for m in maps.values() if hasattr(m, "check")]


def _refuse_read_only(schedule: Schedule) -> None:
    """GraphError if a node writes into a leaf whose array is read-only, as a mapped weight is."""
    for node in schedule.graph.nodes:
        for root in changed_by(node):
            if root.op is None and is_constant(root):
                raise GraphError(
                    f"{node!r} writes over {root!r}, whose array is read-only, as that of a "
                    "weight in a file: give the leaf a copy"
                )


def run(*outputs: Tensor, devices: Devices | None = None) -> list[np.ndarray]:
    """Schedule, bind and run the graph of these outputs; returns copies of their values.

    devices: where it runs; by default on the host alone, in float32.
    """
    return results(Graph.of(*outputs), devices)


def results(graph: Graph, devices: Devices | None = None) -> list[np.ndarray]:
    """Schedule, bind and run a graph; returns copies of its outputs' values. devices: as `run`."""
    program = bind(schedule(graph, devices or Devices()))
    program()
    return [program.read(t) for t in graph.outputs]


_Step = tuple[DevicePart, Tensor | None, Call]  # None: no kernel, but what is done between kernels


def _kind(step: _Step) -> tuple[DevicePart, bool]:
    return step[0], step[1] is not None


def _steps(
    schedule: Schedule,
    kernels: Mapping[Backend, Mapping[Tensor, Call]],
    after: Mapping[Tensor, Sequence[Call]] = MappingProxyType({}),
) -> Iterator[_Step]:
    """All that a run does, in order. after: node → what follows it at once."""
    devices, changed, inputs = schedule.devices, _changed_leaves(schedule), _input_leaves(schedule)
    marks, copies = _copies(schedule)
    for part in schedule.parts:
        first, last = part is schedule.parts[0], part is schedule.parts[-1]
        for call in _for_each(devices, devices.begin, changed if first else ()):
            yield part, None, call
        for call in chain(_before(schedule, part, inputs[part], changed), copies[part]):
            yield part, None, call
        for node in part.nodes:
            if node in (bound := kernels[part.backend]):
                yield part, node, bound[node]
                for then in after.get(node, ()):
                    yield part, None, then
        for call in chain(marks[part], _after(schedule, part)):
            yield part, None, call
        for call in _for_each(devices, devices.end, changed if last else ()):
            yield part, None, call


def _watching(schedule: Schedule, arenas: Mapping[Backend, Any]) -> dict[Tensor, list[Call]]:
    """Node → the calls that hand its numbers to those that watch it."""
    calls = defaultdict[Tensor, list[Call]](list)
    for t, act in schedule.watched.items():
        twin, home, offset = schedule.place(t)
        calls[last_write(twin)].append(Call(_show, act, home, twin, arenas[home], offset))
    return calls


def _show(
    act: Callable[[np.ndarray], None], home: Backend, t: Tensor, arena: Any, offset: int
) -> None:
    home.attach(t.root, arena, offset)
    act(home.read(t))


def _releasing(node: Tensor, device: Backend) -> Iterator[Call]:
    """Calls that free the pages of the weights that a node reads; the host has them."""
    for s in node.src if device.is_host else ():
        if s.root.op is None and (call := device.release(s.root)) is not None:
            yield call


def _changed_leaves(schedule: Schedule) -> Mapping[Tensor, None]:
    """All leaves that the run changes."""
    return dict.fromkeys(t for part in schedule.parts for t in part.changed)


def _input_leaves(schedule: Schedule) -> Mapping[DevicePart, Sequence[Tensor]]:
    """Of each part the leaves that it reads as the first on its device, and that no part changes.

    Unless they are held, they have the host's numbers in the whole run.
    """
    changed, seen = _changed_leaves(schedule), set[tuple[Backend, Tensor]]()
    inputs: dict[DevicePart, Sequence[Tensor]] = {}
    for part in schedule.parts:
        leaves = (t for t in part.leaves if not (t in changed or is_constant(t)))
        inputs[part] = [t for t in leaves if (part.backend, t) not in seen]
        seen |= {(part.backend, t) for t in inputs[part]}
    return inputs


def _for_each(
    devices: Devices, act: Callable[[Tensor], None], leaves: Iterable[Tensor], **of_others: Any
) -> Iterator[Call]:
    """A call that does this to all leaves, if there are any, and devices that have copies."""
    if devices.have_copies and (leaves := tuple(leaves)):
        yield Call(ForEach(devices, act, leaves, **of_others))


def _before(
    schedule: Schedule, part: DevicePart, inputs: Sequence[Tensor], changed: Collection[Tensor]
) -> Iterator[Call]:
    devices = schedule.devices
    fetch = partial(devices.fetch, backend=part.backend)
    write = partial(devices.bind_write, backend=part.backend)
    yield from _for_each(devices, fetch, (t for t in part.leaves if t in changed))
    yield from _for_each(devices, fetch, inputs, of_others=write)


def _copies(
    schedule: Schedule,
) -> tuple[Mapping[DevicePart, list[Call]], Mapping[DevicePart, list[Call]]]:
    """Of each part the calls that mark what it has made for others, at once, since its device may
    be asked for other work before it is taken; and those that take what it reads of others."""
    marks, copies = (dict[DevicePart, list[Call]]() for _ in range(2))
    last: dict[Backend, DevicePart] = {}
    for part in schedule.parts:
        marks[part], copies[part] = [], []
        for copy in part.copies:
            mark, take = part.backend.bind_copy(copy.target, copy.source, copy.giver)
            marks[last[copy.giver]] += [mark] if mark else []
            copies[part].append(take)
        last[part.backend] = part
    return marks, copies


def _after(schedule: Schedule, part: DevicePart) -> Iterator[Call]:
    changed = partial(schedule.devices.note_change, backend=part.backend)
    yield from _for_each(schedule.devices, changed, part.changed)
