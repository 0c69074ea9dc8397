"""Large kernels: many tasks, shared out among the threads, all reading one frame of arguments.

A task is serial code(f, task, thread); its frame f is of pyggml.jit.frames, or a tuple. `launch`
runs stages one after the other, every stage's tasks in parallel. Which thread runs a task must not
matter to its result. Tasks need the JIT: what is written this way has a plain twin.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import Code, types
from pyggml.jit.frames import Frame, FrameType
from pyggml.jit.regions import run_all, run_tasks, write_tuple

SHARE = 4096  # floats of a task of an elementwise kernel: 16 KiB, a few µs of work
_ARRAY_WORDS = 5  # of an array without its shape and its strides; a number takes one
Stage = tuple[int, int, int, Any]  # addresses of code and frame, tasks, what lies there


def task_code(declaration: type[Frame], exact: bool = False) -> Callable[[Callable], Code]:
    """Declare `code(f, task, thread)`, one task of a large kernel whose frame is of this class."""
    signature = types.void(FrameType(declaration), types.intp, types.intp)
    return lambda code: Code(code, signature, exact)


def stage(code: Code, f: Frame, n_tasks: int) -> Stage:
    """One stage of a launch: `code` for tasks 0 … n_tasks − 1 on this frame."""
    return code.address, f.address, n_tasks, f


def tuple_stage(code: Code, values: tuple[Any, ...], n_tasks: int) -> Stage:
    """The same for code that reads a tuple of arrays and numbers."""
    words = np.empty(sum(_ARRAY_WORDS + 2 * np.ndim(value) for value in values), np.int64)
    write_tuple(words, values)
    return code.address, words.ctypes.data, n_tasks, (words, values)


def launch(*stages: Stage) -> None:
    """Run the stages in order."""
    for code, address, n_tasks, _ in stages:
        run_tasks(code, address, n_tasks)


def join_launches(calls: Sequence[Call]) -> Iterator[Call]:
    """The same calls, of which those of `launch` that follow each other are one: between their
    stages runs no Python."""
    for is_launch, some in groupby(calls, lambda call: call.kernel is launch):
        if is_launch:
            stages = list(chain.from_iterable(call.arguments for call in some))
            yield Call(_launch_all, np.array([each[:3] for each in stages], np.int64), stages)
        else:
            yield from some


def _launch_all(table: np.ndarray, stages: Sequence[Stage]) -> None:
    run_all(table)
