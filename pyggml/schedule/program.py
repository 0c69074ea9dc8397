"""Schedule -> numbers: all kernels are bound once, then parts and copies run in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pyggml import runtime
from pyggml.backends import Backend, read
from pyggml.call import Call
from pyggml.schedule.schedule import Schedule
from pyggml.schedule.split import Copy
from pyggml.tensor import Tensor


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
        twin = self.schedule.twins.get(t, t)
        if twin.root.op is None:
            return read(twin)
        home = next(b for b, p in self.schedule.plans.items() if twin.root in p.offsets)
        return home.read(twin)


def bind(schedule: Schedule) -> ScheduledProgram:
    """Take memory on every device, bind every kernel call, and make the copies of constants."""
    programs = {backend: runtime.bind(p) for backend, p in schedule.plans.items()}
    calls = {
        node: call
        for program in programs.values()
        for node, call in zip(program.nodes, program.calls, strict=True)
    }
    for copy in schedule.constants:
        _transfer(copy)
    steps: list[Call] = []
    for part in schedule.parts:
        steps += (Call(_transfer, copy) for copy in part.copies)
        steps += (calls[node] for node in part.nodes if node in calls)
    return ScheduledProgram(schedule, programs, tuple(steps))


def _transfer(copy: Copy) -> None:
    copy.taker.write(copy.target, copy.giver.read(copy.source))
