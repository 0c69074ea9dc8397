"""Large kernels: many tasks, shared out among the threads, all reading one frame of arguments.

A task is serial code(f, task, thread); its frame f is one of pyggml.jit.frames. `launch` runs
stages one after the other, every stage's tasks in parallel. Which thread runs a task must not
matter to its result. Tasks need the JIT: what is written this way has a plain twin.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from pyggml.jit import Code, get_thread_id, intrinsic, parallel, prange, types
from pyggml.jit.frames import Frame, FrameType

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
        _run_tasks(code, address, n_tasks)


@intrinsic
def _call_task(typing: Any, code: Any, frame: Any, task: Any, thread: Any) -> Any:
    """Call the task_code function at address `code`."""
    signature = types.void(*(types.int64,) * 4)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, frame, task, thread = arguments
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [word.as_pointer(), word, word])
        function = builder.inttoptr(address, kind.as_pointer())
        builder.call(function, [builder.inttoptr(frame, word.as_pointer()), task, thread])
        return context.get_dummy_value()

    return signature, codegen


@parallel
def _run_tasks(code, frame, n_tasks):
    for task in prange(n_tasks):
        _call_task(code, frame, task, get_thread_id())
