"""Large kernels: many tasks, shared out among the threads, all reading one frame of arguments.

A task is serial code(f, task, thread); its frame f is one of pyggml.jit.frames. `launch` runs
stages one after the other, every stage's tasks in parallel. Which thread runs a task must not
matter to its result. Tasks need the JIT: what is written this way has a plain twin.
"""

from collections.abc import Callable

from pyggml.jit import Code, types
from pyggml.jit.frames import Frame, FrameType
from pyggml.jit.regions import run_tasks

SHARE = 4096  # floats of a task of an elementwise kernel: 16 KiB, a few µs of work
Stage = tuple[int, int, int, Frame]  # addresses of code and frame, tasks, the frame itself


def task_code(declaration: type[Frame]) -> Callable[[Callable], Code]:
    """Declare `code(f, task, thread)`, one task of a large kernel whose frame is of this class."""
    signature = types.void(FrameType(declaration), types.intp, types.intp)
    return lambda code: Code(code, signature)


def stage(code: Code, f: Frame, n_tasks: int) -> Stage:
    """One stage of a launch: `code` for tasks 0 … n_tasks − 1 on this frame."""
    return code.address, f.address, n_tasks, f


def launch(*stages: Stage) -> None:
    """Run the stages in order."""
    for code, address, n_tasks, _ in stages:
        run_tasks(code, address, n_tasks)
