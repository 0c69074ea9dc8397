"""Large kernels: many tasks, shared out among the threads, all reading one frame of arguments.

A task is serial code(f, task, thread); its frame f is of pyggml.jit.frames, or a tuple. `launch`
runs stages one after the other, every stage's tasks in parallel. Which thread runs a task must not
matter to its result. Tasks need the JIT: what is written this way has a plain twin.

What a stage needs may be known only as it runs: how many keys are seen, whether ids are rows. An
earlier stage then says how many tasks it has, or declines for it, and Python does its work or
raises an error. So nothing has to be looked at in Python before a launch.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import typeof

from pyggml.jit import Code, types
from pyggml.jit.frames import Frame, FrameType
from pyggml.jit.regions import run_all, run_tasks

SHARE = 4096  # floats of a task of an elementwise kernel: 16 KiB, a few µs of work


class Extent(NamedTuple):
    """Memory that tasks touch: where it lies, and how many bytes of it are a task's own; 0 if any
    task touches any of them, −n if n bytes are each thread's. is_read: nothing is written there."""

    start: int
    n_bytes: int
    each: int = 0
    is_read: bool = False

    @classmethod
    def of(cls, x: np.ndarray, each: int = 0, is_read: bool = False) -> "Extent":
        """An array, flat or without gaps; each: steps along its first axis that are a task's."""
        last = sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True))
        n_bytes = (last + x.itemsize) if x.size else 0
        extent = cls(x.ctypes.data, n_bytes, each * x.strides[0], is_read)
        return _EXTENTS.get({}).setdefault(extent, extent)

    def excludes(self, other: "Extent") -> bool:
        """Whether tasks of one may not run beside those of the other."""
        overlap = (
            self.start < other.start + other.n_bytes and other.start < self.start + self.n_bytes
        )
        of_threads = self == other and self.each < 0
        return overlap and not of_threads and not (self.is_read and other.is_read)


# Those of the kernels that are bound: layers share theirs, and a step has 25,000.
_EXTENTS: ContextVar[dict[Extent, Extent]] = ContextVar("extents")


@contextmanager
def shared_extents() -> Iterator[None]:
    """Within, extents of the same memory are one object."""
    token = _EXTENTS.set({})
    try:
        yield
    finally:
        _EXTENTS.reset(token)


def pieces(x: np.ndarray, each: int, is_read: bool = False) -> Extent:
    """An array of which each task has so many steps along the first axis."""
    return Extent.of(x, each, is_read)


def whole(x: np.ndarray, is_read: bool = True) -> Extent:
    """An array of which tasks touch anything."""
    return Extent.of(x, 0, is_read)


def of_threads(scratch: Mapping[str, np.ndarray]) -> list[Extent]:
    """Arrays of which each thread has a step along the first axis."""
    return [Extent.of(x, -1) for x in scratch.values()]


class TaskStage(NamedTuple):
    """Tasks 0 … n_tasks − 1 on one frame.

    code, frame  addresses
    n_tasks      or a word, (1,) int64, in which an earlier stage says how many; below 0: it
                 declines
    lies         what lies at the frame's address
    instead      what is called where it declines: does its work, or raises an error
    touches      all memory that its tasks touch, if that is said (pyggml.jit.chains)
    """

    code: int
    frame: int
    n_tasks: int | np.ndarray
    lies: Any
    instead: Callable[[], None] | None = None
    touches: Sequence[Extent] = ()


def task_code(
    declaration: type[Frame], exact: bool = False, n_integers: int = 2
) -> Callable[[Callable], Code]:
    """Declare `code(f, task, thread)`, one task of a large kernel whose frame is of this class; or
    code that its tasks call by the address, with other integers."""
    signature = types.void(FrameType(declaration), *(types.intp,) * n_integers)
    return lambda code: Code(code, signature, exact)


_CODES: dict[tuple[Callable, type[Frame]], Code] = {}


def frame_code(task: Callable, declaration: type[Frame]) -> Code:
    """A task that serves several classes of frames, for one of them; declared once."""
    if (task, declaration) not in _CODES:
        _CODES[task, declaration] = task_code(declaration)(task)
    return _CODES[task, declaration]


def stage(code: Code, f: Frame, n_tasks: int | np.ndarray, *touches: Extent) -> TaskStage:
    """One stage of a launch: `code` on this frame."""
    return TaskStage(code.address, f.address, n_tasks, f, None, touches)


def tuple_stage(
    code: Code,
    values: tuple[Any, ...],
    n_tasks: int | np.ndarray,
    instead: Callable[[], None] | None = None,
    touches: Sequence[Extent] = (),
) -> TaskStage:
    """The same for code that reads a tuple of arrays and numbers."""
    words = tuple_words(values)
    return TaskStage(code.address, words.ctypes.data, n_tasks, (words, values), instead, touches)


def tuple_words(values: tuple[Any, ...]) -> np.ndarray:
    """A tuple of arrays and numbers as compiled code reads it, in whole words. Arrays have no
    owner: Numba would count it."""
    form, numbers = "", list[Any]()
    for value in values:
        if isinstance(value, np.ndarray):
            form += f"{5 + 2 * value.ndim}q"
            numbers += 0, 0, value.size, value.itemsize, value.ctypes.data
            numbers += (*value.shape, *value.strides)
        else:
            form += (
                "f" if isinstance(value, np.float32) else "d" if isinstance(value, float) else "q"
            )
            numbers.append(value)
    content = struct.pack(form + "0q", *numbers)  # filled up to whole words
    return np.frombuffer(content, np.int64).copy()


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


def table_of(stages: Sequence[TaskStage]) -> np.ndarray:
    """Stages as `run_all` reads them, (stages, 4)."""
    return np.array([_row(each) for each in stages], np.int64)


def _row(each: TaskStage) -> tuple[int, int, int, int]:
    if isinstance(each.n_tasks, np.ndarray):
        return each.code, each.frame, 0, each.n_tasks.ctypes.data
    return each.code, each.frame, each.n_tasks, 0


def launch_all(table: np.ndarray, stages: Sequence[TaskStage]) -> None:
    at = run_all(table, 0)
    while at < len(stages):
        instead = stages[at].instead
        assert instead is not None
        instead()
        at = run_all(table, at + 1)
