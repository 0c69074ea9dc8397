"""Fewer regions: stages that wait for one another piece by piece, or not at all, are one region.

A stage may say what memory its tasks touch. Where two stages share arrays of which the tasks of
both have pieces, a task of the later one needs what a few tasks of the earlier one wrote, and no
more. So one thread runs these, one after the other: a chain. Threads meet once, and what a task
wrote is still in its caches when the next one reads it.

    add          0 1 2 3 4 5 6 7 | 8 …     4 rows each: eight tasks are together
    rms_norm     0 1 2 3 4 5 6 7 | 8 …     4
    mul_mat      0       1       | 2 …    16: two
    packing      0               | 1 …    32: one

Chains that share nothing run side by side in one region: where one has few tasks, or its last ones
end late, threads go on with others. So a stage may run before some that stood before it. Tasks are
the same, and which thread runs one does not matter: so are the bits.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, groupby, product
from math import ceil
from typing import Any

import numpy as np
from numba import types

from pyggml.graph.call import Call
from pyggml.jit.code import Code
from pyggml.jit.cores import n_cores
from pyggml.jit.regions import call_task
from pyggml.jit.tasks import Extent, TaskStage, launch, launch_all, table_of

_LOOK_BACK = 8  # regions, the last ones, in which a stage may run


def _run_chain(words, task, thread):
    """words: how many stages; of each its code, frame, tasks, and how many of them are together."""
    for i in range(1, 1 + 4 * words[0], 4):
        code, frame, n_tasks, n = words[i], words[i + 1], words[i + 2], words[i + 3]
        for each in range(task * n, min(task * n + n, n_tasks)):
            call_task(code, frame, each, thread)


def _run_branch(words, task, thread):
    """words: of each branch its code, frame, and the first task that is not its own."""
    i = first = 0
    while task >= words[i + 2]:
        first = words[i + 2]
        i += 3
    call_task(words[i], words[i + 1], task - first, thread)


_SIGNATURE = types.void(types.CPointer(types.int64), types.intp, types.intp)
CHAIN, BRANCH = Code(_run_chain, _SIGNATURE), Code(_run_branch, _SIGNATURE)


def _stage(code: Code, numbers: Iterable[int], n_tasks: int, lies: Any) -> TaskStage:
    words = np.array(list(numbers), np.int64)
    return TaskStage(code.address, words.ctypes.data, n_tasks, (words, lies))


def _together(a: Extent, b: Extent) -> tuple[int, int] | None:
    """How many pieces of each are as large as some of the other; None if they are not pieces."""
    if a.start != b.start or min(a.each, b.each) <= 0 or max(a.each, b.each) % min(a.each, b.each):
        return None
    return max(1, b.each // a.each), max(1, a.each // b.each)


class _Chain:
    """Stages, and how many tasks of each are together in one of n_tasks."""

    def __init__(self, stage: TaskStage) -> None:
        self.stages = [stage]
        self.n = [1]
        self.n_tasks = stage.n_tasks if isinstance(stage.n_tasks, int) else 0

    def excludes(self, stage: TaskStage) -> bool:
        """Whether a stage must wait for these as a whole, or may have to."""
        if not (stage.touches and self.stages[0].touches):
            return True
        parts = chain.from_iterable(own.touches for own in self.stages)
        return any(a.excludes(b) for a, b in product(parts, stage.touches))

    def take(self, stage: TaskStage, n_threads: int) -> bool:
        """Add a stage, if it waits for these piece by piece, and all threads still have tasks; or
        if both are one task."""
        if self.stages[0].touches and self.n_tasks == stage.n_tasks == 1:
            self.stages.append(stage)
            self.n.append(1)
            return True
        ratios = set[tuple[int, int] | None]()
        for own, n in zip(self.stages, self.n, strict=True):
            for a, b in product(own.touches, stage.touches):
                if a.excludes(b):
                    ratios.add(_together(a._replace(each=a.each * n), b))
        if len(ratios) != 1 or (ratio := ratios.pop()) is None:
            return False
        n_tasks = ceil(self.n_tasks / ratio[0])
        if n_tasks != ceil(stage.n_tasks / ratio[1]) or n_tasks < n_threads:
            return False
        self.stages.append(stage)
        self.n, self.n_tasks = [*(n * ratio[0] for n in self.n), ratio[1]], n_tasks
        return True

    def as_one(self) -> TaskStage:
        """A stage that does all."""
        if len(self.stages) == 1:
            return self.stages[0]
        each = zip(self.stages, self.n, strict=True)
        rows = [(s.code, s.frame, int(s.n_tasks), n) for s, n in each]
        return _stage(CHAIN, (len(rows), *chain.from_iterable(rows)), self.n_tasks, self.stages)


class _SideBySide(list[_Chain]):
    """Chains side by side."""

    def excludes(self, stage: TaskStage) -> bool:
        """Whether a stage cannot run beside these."""
        return any(own.excludes(stage) for own in self)

    def take(self, stage: TaskStage, n_threads: int) -> bool:
        """Have a stage run as part of one of these and beside the others."""
        waits = [own for own in self if own.excludes(stage)]
        return len(waits) == 1 and waits[0].take(stage, n_threads)

    def as_one(self) -> TaskStage:
        """A stage that does all."""
        if len(self) == 1:
            return self[0].as_one()
        fewest_first = sorted(self, key=lambda own: own.n_tasks)  # whose tasks are the longest
        stages = [own.as_one() for own in fewest_first]
        ends = list(accumulate(own.n_tasks for own in fewest_first))
        rows = [(s.code, s.frame, end) for s, end in zip(stages, ends, strict=True)]
        return _stage(BRANCH, chain.from_iterable(rows), ends[-1], stages)


def in_fewer(stages: Iterable[TaskStage], n_threads: int) -> list[TaskStage]:
    """The same tasks in fewer stages, of which each begins when the one before has ended."""
    regions: list[_SideBySide] = []
    for stage in stages:
        beside = None  # the first region that it can run beside
        for region in regions[: -_LOOK_BACK - 1 : -1]:
            if region.excludes(stage):
                if stage.touches and region.take(stage, n_threads):
                    break
                _place(regions, beside).append(_Chain(stage))
                break
            beside = region
        else:
            _place(regions, beside).append(_Chain(stage))
    return [region.as_one() for region in regions]


def _place(regions: list[_SideBySide], beside: _SideBySide | None) -> _SideBySide:
    """That region, or a new one."""
    if beside is None:
        regions.append(beside := _SideBySide())
    return beside


def join_launches(calls: Sequence[Call]) -> Iterator[Call]:
    """The same calls, of which those of `launch` that follow each other are one: between their
    stages runs no Python."""
    for is_launch, run in groupby(calls, lambda call: call.kernel is launch):
        if is_launch:
            stages = in_fewer(chain.from_iterable(call.arguments for call in run), n_cores())
            yield Call(launch_all, table_of(stages), stages)
        else:
            yield from run


def stages_apart(call: Call) -> Iterator[Call]:
    """The stages of a joined call, a call each: between them Python runs. Any other as it is."""
    if call.kernel is not launch_all:
        yield call
        return
    table, stages = call.arguments
    for i in range(len(stages)):
        yield Call(launch_all, table[i : i + 1], stages[i : i + 1])
