"""Kernels compiled side by side, before a program launches them for the first time.

Numba compiles one kernel at a time, as its front end holds the interpreter. So this process is
forked: each of the others has all kernels that the program launches, takes the next one that none
has taken, and keeps its machine code on disk (cubins.py), where this process finds it. They ask
the driver nothing, which a forked process cannot use. Where there is no fork, no store or one core,
and for what they leave, each kernel is compiled when it is first launched.
"""

import gc
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from time import monotonic
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.runtime.launches import launches
from pyggml.backends.cuda.runtime.toolkit import SIMULATED
from pyggml.graph.call import Call
from pyggml.jit.cores import n_cores

_MOST = 16  # processes
_SECONDS = 120  # that all of them have together: a fork of a process with threads may hang
_NUMBER = np.uint16().nbytes
_NO_FORK = OSError, AssertionError  # for want of memory, and in a process that may have none


class _MissingKernel(NamedTuple):
    """A kernel for arguments of these types, and the file that is to have it."""

    kernel: Any
    types: tuple[Any, ...]
    path: Path


def compile_missing(calls: Iterable[Call]) -> None:
    """Compile what the calls launch and is not compiled yet, in processes side by side."""
    if SIMULATED or sys.platform != "linux" or n_cores() == 1:
        return
    missing = _missing(calls)
    if len(missing) > 1:
        _in_processes(missing, min(n_cores(), len(missing), _MOST))


def _missing(calls: Iterable[Call]) -> list[_MissingKernel]:
    launched: dict[tuple[Any, ...], None] = {}
    for call in calls:
        for kernel, arguments in launches(call):
            types = tuple(map(kernel.typeof_pyval, arguments))
            if types not in kernel.overloads:
                launched[kernel, types] = None
    files = ((*one, getattr(one[0]._cache, "path", _nowhere)(one[1])) for one in launched)
    missing = [_MissingKernel(*f) for f in files if f[2] is not None and not f[2].exists()]
    return sorted(missing, key=lambda one: -_size(one.kernel.py_func))


def _nowhere(_types: tuple[Any, ...]) -> None:
    """Of a kernel without a store."""


def _size(function: Any) -> int:
    """Bytes of code of a function and of those that it calls: the longest come first, as one that
    begins last would be waited for alone."""
    function = getattr(function, "py_func", function)
    if not isinstance(function, FunctionType):
        return 0
    names = (function.__globals__.get(name) for name in function.__code__.co_names)
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    called = [*cells, *(f for f in names if hasattr(f, "py_func"))]
    return len(function.__code__.co_code) + sum(map(_size, called))


def _in_processes(missing: Sequence[_MissingKernel], n: int) -> None:
    from numba.cuda import dispatcher

    numbers, more = os.pipe()  # of kernels that none has taken
    os.write(more, np.arange(len(missing), dtype=np.uint16).tobytes())
    os.close(more)
    capability = dispatcher.get_current_device().compute_capability
    arguments = numbers, missing, SimpleNamespace(compute_capability=capability)
    started: list[Any] = []
    collects = gc.isenabled()
    gc.disable()  # what is garbage now would ask the driver to free it, in the others too
    try:
        with dispatcher.global_compiler_lock, warnings.catch_warnings(), suppress(*_NO_FORK):
            warnings.simplefilter("ignore", DeprecationWarning)  # that this one has threads
            for _ in range(n):
                process = get_context("fork").Process(target=_take, args=arguments)
                process.start()
                started.append(process)
        until = monotonic() + _SECONDS
        for process in started:
            process.join(max(0.0, until - monotonic()))
    finally:
        for process in started:
            process.kill()
        os.close(numbers)
        if collects:
            gc.enable()


def _take(numbers: int, missing: Sequence[_MissingKernel], card: Any) -> None:
    """In a process of its own: compile what none has taken, one after the other.

    card: stands for the current one, of which the driver would be asked
    """
    from numba.cuda import codegen, dispatcher

    from pyggml.backends.cuda.runtime.cubins import keep

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits
    dispatcher.get_current_device = lambda: card
    codegen.devices = SimpleNamespace(get_context=lambda: SimpleNamespace(device=card))
    while number := os.read(numbers, _NUMBER):
        with suppress(Exception):  # which the process that launches the kernel meets too, and says
            one = missing[int.from_bytes(number, sys.byteorder)]
            kernel = dispatcher._Kernel(one.kernel.py_func, one.types, **one.kernel.targetoptions)
            keep(one.path, kernel)
