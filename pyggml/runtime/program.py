"""Schedule → numbers: all kernels are bound once, then parts and copies run in order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pyggml import runtime
from pyggml.backends import Backend, is_constant, read
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.tensor import Tensor
from pyggml.runtime.schedule.devices import Devices, ForEach
from pyggml.runtime.schedule.schedule import Schedule, schedule
from pyggml.runtime.schedule.split import Copy, Part


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledProgram:
    """A schedule with memory: kernel calls and copies in the order of execution."""

    schedule: Schedule
    programs: Mapping[Backend, runtime.Program]
    calls: tuple[Call, ...]

    def __call__(self) -> None:
        """Compute every output of the graph."""
        for call in self.calls:
            call()

    def read(self, t: Tensor) -> np.ndarray:
        """A copy of an output's numbers, from the device that computed it."""
        return self.begin_read(t)()

    def begin_read(self, t: Tensor) -> Callable[[], np.ndarray]:
        """Begin to read an output, as Backend.begin_read: what this run made, given later."""
        if t.root.op is None:
            self.schedule.devices.gather(t.root)
            found = read(t)
            return lambda: found
        twin = self.schedule.twins.get(t, t)
        home = next(b for b, p in self.schedule.plans.items() if twin.root in p.offsets)
        return home.begin_read(twin)

    def walk(self) -> Iterator[tuple[Tensor, Backend]]:
        """Run node by node; yields each node after it has run, with the device that has its result.

        Meant for looking inside: a result stays readable until its memory is used again.
        """
        calls, inputs = _calls(self.programs), _inputs(self.schedule)
        changed = _changed(self.schedule)
        for part in self.schedule.parts:
            for call in _before(self.schedule, part, inputs[part], changed):
                call()
            for node in part.nodes:
                if node in calls:
                    calls[node]()
                    yield node, part.backend
            for call in _after(self.schedule, part):
                call()


class Arenas:
    """Memory on every device, as much as the largest program needs: one program runs at a time.

    If a larger program comes later, earlier ones keep the memory that they have.
    """

    def __init__(self) -> None:
        self._held: dict[Backend, tuple[int, Any]] = {}

    def of(self, backend: Backend, n_bytes: int) -> Any:
        """n_bytes or more of a device. If it must grow, it grows to twice its size at least."""
        held = self._held.get(backend, (0, None))
        if held[1] is None or held[0] < n_bytes:
            n = max(n_bytes, 2 * held[0])
            held = self._held[backend] = n, backend.alloc(n)
        return held[1]


def bind(
    *schedules: Schedule, release: bool = False, arenas: Arenas | None = None
) -> tuple[ScheduledProgram, ...]:
    """Take memory on every device, bind every kernel call, and copy the constants.

    The programs share this memory: the outputs of one last until another one runs. Programs bound
    with the same `arenas` share it too. release: see pyggml.runtime.bind.
    """
    arenas, memory = arenas or Arenas(), {}
    for backend in {b: None for made in schedules for b in made.plans}:
        n_bytes = max(made.plans[backend].n_bytes for made in schedules if backend in made.plans)
        memory[backend] = arenas.of(backend, n_bytes)
    return tuple(_bound(made, memory, release) for made in schedules)


def results(graph: Graph, devices: Devices) -> list[np.ndarray]:
    """Schedule, bind and run a graph; returns copies of its outputs' values."""
    (program,) = bind(schedule(graph, devices))
    program()
    return [program.read(t) for t in graph.outputs]


def _bound(made: Schedule, arenas: Mapping[Backend, object], release: bool) -> ScheduledProgram:
    if not _is_alone(made):
        _copy_constants(made)
    programs = {
        backend: runtime.bind(p, arenas[backend], release and backend.is_host)
        for backend, p in made.plans.items()
    }
    if _is_alone(made):
        (only,) = programs.values()
        return ScheduledProgram(made, programs, only.calls)
    calls, devices, inputs, changed = _calls(programs), made.devices, _inputs(made), _changed(made)
    steps = list(_for_each(devices, devices.begin, changed))
    for part in made.parts:
        steps += _before(made, part, inputs[part], changed)
        bound, graph = [calls[n] for n in part.nodes if n in calls], made.plans[part.backend].graph
        steps += part.backend.joined(bound, graph)
        steps += _after(made, part)
    steps += _for_each(devices, devices.end, changed)
    return ScheduledProgram(made, programs, tuple(steps))


def _is_alone(made: Schedule) -> bool:
    """Whether one host is the only device, so that no leaf has a copy."""
    return all(b.is_host for b in made.devices.backends) and len(made.plans) == 1


def _calls(programs: Mapping[Backend, runtime.Program]) -> Mapping[Tensor, Call]:
    return {
        node: call
        for program in programs.values()
        for node, call in zip(program.nodes, program.calls, strict=True)
    }


def _copy_constants(made: Schedule) -> None:
    for part in made.parts:
        for leaf in part.leaves:
            if is_constant(leaf):
                made.devices.fetch(leaf, part.backend)


def _changed(made: Schedule) -> Mapping[Tensor, None]:
    """All leaves that the run changes."""
    return dict.fromkeys(t for part in made.parts for t in part.changed)


def _inputs(made: Schedule) -> Mapping[Part, Sequence[Tensor]]:
    """Of each part the leaves that it reads as the first on its device, and that no part changes.

    Unless they are held, they have the host's numbers in the whole run.
    """
    changed, seen = _changed(made), set[tuple[Backend, Tensor]]()
    found: dict[Part, Sequence[Tensor]] = {}
    for part in made.parts:
        leaves = (t for t in part.leaves if not (t in changed or is_constant(t)))
        found[part] = [t for t in leaves if (part.backend, t) not in seen]
        seen |= {(part.backend, t) for t in found[part]}
    return found


def _for_each(
    devices: Devices, act: Callable[[Tensor], None], leaves: Iterable[Tensor], **of_others: Any
) -> Iterator[Call]:
    """A call that does this to all leaves, if there are any."""
    if leaves := tuple(leaves):
        yield Call(ForEach(devices, act, leaves, **of_others))


def _before(
    made: Schedule, part: Part, inputs: Sequence[Tensor], changed: Collection[Tensor]
) -> Iterator[Call]:
    devices = made.devices
    fetch = partial(devices.fetch, backend=part.backend)
    write = partial(devices.bind_write, backend=part.backend)
    yield from _for_each(devices, fetch, (t for t in part.leaves if t in changed))
    yield from _for_each(devices, fetch, inputs, of_others=write)
    for copy in part.copies:
        yield Call(_transfer, copy)


def _after(made: Schedule, part: Part) -> Iterator[Call]:
    changed = partial(made.devices.changed, backend=part.backend)
    yield from _for_each(made.devices, changed, part.changed)


def _transfer(copy: Copy) -> None:
    copy.taker.write(copy.target, copy.giver.read(copy.source))
