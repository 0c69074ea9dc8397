"""Large kernels: many tasks, shared out among the threads, all reading one frame of arguments.

A task is serial code(f, task, thread); its frame f is one of pyggml._frames. `launch` runs stages
one after the other, every stage's tasks in parallel. Which thread runs a task must not matter to
its result. Tasks need the JIT: what is written this way has a plain twin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from pyggml._frames import Frame, FrameType
from pyggml._jit import (
    Code,
    carray,
    get_thread_id,
    intrinsic,
    kernel,
    parallel,
    prange,
    types,
)

SLOT = 4  # int64 per argument

Stage = tuple[int, int, int, Any]  # addresses of code and frame, tasks, the frame itself


def task_code(declaration: type[Frame]) -> Callable[[Callable], Code]:
    """Declare `code(f, task, thread)`, one task of a large kernel whose frame is of this class."""
    signature = types.void(FrameType(declaration), types.intp, types.intp)
    return lambda code: Code(code, signature, None)


def frame(*arguments: Any) -> np.ndarray:
    """The arguments of a kernel as one int64 array; arrays must be C-contiguous and stay alive."""
    slots = np.zeros((len(arguments), SLOT), np.int64)
    for slot, value in zip(slots, arguments, strict=True):
        if isinstance(value, np.ndarray):
            assert value.flags.c_contiguous
            slot[: 1 + value.ndim] = value.ctypes.data, *value.shape
        elif isinstance(value, float | np.floating):
            slot[0] = np.float32(value).view(np.int32)
        else:
            slot[0] = value
    return slots.reshape(-1)


def stage(code: Code, f: Frame | np.ndarray, n_tasks: int) -> Stage:
    """One stage of a launch: `code` for tasks 0 … n_tasks − 1 on this frame."""
    words = f.words if isinstance(f, Frame) else f
    return code.address, words.ctypes.data, n_tasks, f


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


# -- reading a frame inside a task ----------------------------------------------------------------


@intrinsic
def _as_pointer(typing: Any, address: Any) -> Any:
    """An address as the pointer that `carray` takes."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(address), codegen


@kernel
def floats1(frame, i):
    """Argument i as a float32 array of one axis."""
    return carray(_as_pointer(frame[SLOT * i]), (frame[SLOT * i + 1],), np.float32)


@kernel
def floats2(frame, i):
    """Argument i as a float32 array of two axes."""
    shape = (frame[SLOT * i + 1], frame[SLOT * i + 2])
    return carray(_as_pointer(frame[SLOT * i]), shape, np.float32)


@kernel
def floats3(frame, i):
    """Argument i as a float32 array of three axes."""
    shape = (frame[SLOT * i + 1], frame[SLOT * i + 2], frame[SLOT * i + 3])
    return carray(_as_pointer(frame[SLOT * i]), shape, np.float32)


@kernel
def shorts1(frame, i):
    """Argument i as a uint16 array of one axis."""
    return carray(_as_pointer(frame[SLOT * i]), (frame[SLOT * i + 1],), np.uint16)


@kernel
def halves3(frame, i):
    """Argument i, an array of halves of three axes, as their bits."""
    shape = (frame[SLOT * i + 1], frame[SLOT * i + 2], frame[SLOT * i + 3])
    return carray(_as_pointer(frame[SLOT * i]), shape, np.uint16)


@kernel
def ints2(frame, i):
    """Argument i as an int32 array of two axes."""
    shape = (frame[SLOT * i + 1], frame[SLOT * i + 2])
    return carray(_as_pointer(frame[SLOT * i]), shape, np.int32)


@kernel
def integer(frame, i):
    """Argument i as an integer."""
    return frame[SLOT * i]


@kernel
def real(frame, i):
    """Argument i as a float32."""
    return np.int32(frame[SLOT * i]).view(np.float32)
