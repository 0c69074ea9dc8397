"""The threads that share out the tasks of pyggml.jit.regions: Python's, each inside one compiled
function. The first region of a process starts them; after a fork, so does the child's first.
"""

import atexit
import ctypes
import os
import signal
import threading
import warnings
from collections.abc import Callable

import llvmlite.binding as llvm
import numba.np.ufunc.parallel as numba_threads
from numba.core import config

from pyggml.jit.cores import n_cores
from pyggml.jit.decorators import compile_for
from pyggml.jit.isa import JIT
from pyggml.jit.regions import (
    ACQUIRE,
    ACTIVE,
    ENDED,
    FOR,
    LOCK,
    LOOP,
    NEW,
    RELEASE,
    RUNNING,
    SHARE,
    START,
    STATE,
    THREAD,
    words,
    work,
)
from pyggml.jit.workarounds import PARALLEL_FOR


def _launch_layer(launch: Callable[[], None]) -> None:
    """Have Numba make ready the layer that it is told to take, or if that is not to be had its work
    queue, which is always there: no loop of this package runs in it."""
    try:
        launch()
    except ValueError:
        named, config.THREADING_LAYER = config.THREADING_LAYER, "workqueue"
        try:
            launch()
        finally:
            config.THREADING_LAYER = named
        warnings.warn(
            f"NUMBA_THREADING_LAYER={named} cannot be loaded by Numba: other code that it compiles "
            "gets its work queue; pyggml's threads are its own",
            RuntimeWarning,
            stacklevel=2,
        )


def _take_loops() -> None:
    """Have this package's loops with `prange` run here, once Numba has made ready its own layer:
    it does so before it compiles or loads the first of them."""
    launch = numba_threads._launch_threads

    def launch_both() -> None:
        _launch_layer(launch)
        if not words[LOOP]:
            words[LOOP] = SHARE.address
            llvm.add_symbol(PARALLEL_FOR, FOR.address)

    numba_threads._launch_threads = launch_both


_threads: list[threading.Thread] = []
_starting = threading.Lock()
# Locks of Python's, which serve without the GIL too.
_allocate = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThread_allocate_lock", ctypes.pythonapi))
_acquire = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)(
    (ACQUIRE, ctypes.pythonapi)
)
_release = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)((RELEASE, ctypes.pythonapi))


def _new_lock() -> int:
    """The address of a lock in which the first to come sleeps until it is released."""
    lock = _allocate()
    _acquire(lock, 1)
    return int(lock)


def _live(thread: int) -> None:
    """A thread's life. It leaves signals to others: Ctrl-C must wake the main thread out of what it
    waits for."""
    if hasattr(signal, "pthread_sigmask"):
        faults = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - faults)
    work(thread)


@ctypes.CFUNCTYPE(None)
def _start() -> None:
    """Start the threads, unless that is done. They stay until the process ends."""
    with _starting:
        if words[STATE] != NEW:
            return
        words[STATE] = RUNNING
        words[LOCK::THREAD] = [_new_lock() for _ in range(n_cores())]
        compile_for(work, (0,))
        for t in range(1, n_cores()):
            thread = threading.Thread(target=_live, args=(t,), name=f"pyggml-{t}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system grants no more, or the interpreter ends
                warnings.warn(f"kernels use {t} threads: {error}", RuntimeWarning, stacklevel=2)
                break
            _threads.append(thread)


def _end() -> None:
    """End the threads, before the interpreter ends; whoever computes later does it alone."""
    words[STATE] = ENDED
    for thread, lock in zip(_threads, words[LOCK + THREAD :: THREAD], strict=False):
        _release(int(lock))
        thread.join(1)


def _forget() -> None:
    """In a child after a fork: its parent's threads are not here, whatever they did."""
    global _starting
    _starting = threading.Lock()
    _threads.clear()
    kept = words[[ACTIVE, START, LOOP]]
    words[:] = 0
    words[[ACTIVE, START, LOOP]] = kept


if JIT:
    words[START] = ctypes.cast(_start, ctypes.c_void_p).value
    for name, function in ((ACQUIRE, _acquire), (RELEASE, _release)):
        llvm.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
    _take_loops()
    atexit.register(_end)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget)


def active() -> int:
    """How many threads regions use."""
    return int(words[ACTIVE])


def use(n: int) -> None:
    """Have regions that begin from now on use n threads, at most n_cores()."""
    words[ACTIVE] = n
