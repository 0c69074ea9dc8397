"""Large kernels: many tasks, shared out among the threads, all reading one frame of arguments.

A task is serial code(f, task, thread); its frame f is of pyggml.jit.frames, or a tuple. `launch`
runs stages one after the other, every stage's tasks in parallel. Which thread runs a task must not
matter to its result. Tasks need the JIT: what is written this way has a plain twin.

What a stage needs may be known only as it runs: how many keys are seen, whether ids are rows. An
earlier stage then says how many tasks it has, or declines for it, and Python does its work or
raises an error. So nothing has to be looked at in Python before a launch.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np
from numba import typeof

from pyggml.graph.call import Call
from pyggml.jit import Code, types
from pyggml.jit.frames import Frame, FrameType
from pyggml.jit.regions import run_all, run_tasks, write_tuple

SHARE = 4096  # floats of a task of an elementwise kernel: 16 KiB, a few µs of work
_ARRAY_WORDS = 5  # of an array without its shape and its strides; a number takes one


class TaskStage(NamedTuple):
    """Tasks 0 … n_tasks − 1 on one frame.

    code, frame  addresses
    n_tasks      or a word, (1,) int64, in which an earlier stage says how many; below 0: it
                 declines
    lies         what lies at the frame's address
    instead      what is called where it declines: does its work, or raises an error
    """

    code: int
    frame: int
    n_tasks: int | np.ndarray
    lies: Any
    instead: Callable[[], None] | None = None


def task_code(declaration: type[Frame], exact: bool = False) -> Callable[[Callable], Code]:
    """Declare `code(f, task, thread)`, one task of a large kernel whose frame is of this class."""
    signature = types.void(FrameType(declaration), types.intp, types.intp)
    return lambda code: Code(code, signature, exact)


def stage(code: Code, f: Frame, n_tasks: int | np.ndarray) -> TaskStage:
    """One stage of a launch: `code` on this frame."""
    return TaskStage(code.address, f.address, n_tasks, f)


def tuple_stage(
    code: Code,
    values: tuple[Any, ...],
    n_tasks: int | np.ndarray,
    instead: Callable[[], None] | None = None,
) -> TaskStage:
    """The same for code that reads a tuple of arrays and numbers."""
    words = np.empty(sum(_ARRAY_WORDS + 2 * np.ndim(value) for value in values), np.int64)
    write_tuple(words, values)
    return TaskStage(code.address, words.ctypes.data, n_tasks, (words, values), instead)


@cache
def _code_of(task: Callable, kinds: tuple[Any, ...]) -> Code:
    return Code(task, types.void(types.CPointer(types.Tuple(kinds)), types.intp, types.intp))


def code_for(task: Callable, values: tuple[Any, ...]) -> Code:
    """A task that reads a tuple, for values of these kinds."""
    return _code_of(task, tuple(typeof(value) for value in values))


def gate(word: np.ndarray, instead: Callable[[], None]) -> TaskStage:
    """A stage without tasks: it calls `instead` if the word is −1, not 0."""
    return TaskStage(0, 0, word, None, instead)


def launch(*stages: TaskStage) -> None:
    """Run the stages in order."""
    for each in stages:
        n_tasks = each.n_tasks[0] if isinstance(each.n_tasks, np.ndarray) else each.n_tasks
        if n_tasks < 0 and each.instead is not None:
            each.instead()
        else:
            run_tasks(each.code, each.frame, n_tasks)


def join_launches(calls: Sequence[Call]) -> Iterator[Call]:
    """The same calls, of which those of `launch` that follow each other are one: between their
    stages runs no Python."""
    for is_launch, some in groupby(calls, lambda call: call.kernel is launch):
        if is_launch:
            stages = list(chain.from_iterable(call.arguments for call in some))
            yield Call(_launch_all, table_of(stages), stages)
        else:
            yield from some


def table_of(stages: Sequence[TaskStage]) -> np.ndarray:
    """Stages as `run_all` reads them, (stages, 4)."""
    return np.array([_row(each) for each in stages], np.int64)


def _row(each: TaskStage) -> tuple[int, int, int, int]:
    if isinstance(each.n_tasks, np.ndarray):
        return each.code, each.frame, 0, each.n_tasks.ctypes.data
    return each.code, each.frame, each.n_tasks, 0


def _launch_all(table: np.ndarray, stages: Sequence[TaskStage]) -> None:
    at = run_all(table, 0)
    while at < len(stages):
        instead = stages[at].instead
        assert instead is not None
        instead()
        at = run_all(table, at + 1)
