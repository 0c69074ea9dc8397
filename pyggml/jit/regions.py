"""Regions: a number of tasks that the threads of pyggml.jit.pool share out among themselves.

A region's owner writes what its tasks are into the words below, then how many; every thread takes
one after the other by counting down, the owner too, until none is left. The owner waits for tasks
that were taken, never for a thread that sleeps or that the system lets wait: so a region costs
little where other processes want the cores.

A thread without tasks looks for them for some 40 µs (SPINS), then sleeps in a lock of Python's:
three calls that are the same on Linux, macOS and Windows and need no GIL. It is woken, if there is
work, by the thread above it in a tree of which the owner is the root.

One region owns the threads at a time. A second one, of another Python thread or inside a task, runs
its tasks itself, and becomes the owner if the first ends meanwhile: nothing waits for it, so
nothing locks up.

Loops with `prange` are regions as well: this package's compiled code calls `_parallel_for` where
Numba's would call its OpenMP, TBB or work queue (see pyggml.jit.workarounds).
"""

from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pyggml.jit.atomics import SYMBOL, add, load, pause, store, swap, word
from pyggml.jit.code import Code
from pyggml.jit.cores import n_cores
from pyggml.jit.decorators import OPTIONS, kernel
from pyggml.jit.llvm import I8, I32, I64

ACQUIRE, RELEASE = "PyThread_acquire_lock", "PyThread_release_lock"  # C functions of Python's

# Words of 64 bits; those that threads write at the same time are two cache lines apart, as CPUs
# fetch pairs of lines.
LINE = 16
_LEFT = 0  # tasks that nobody has taken; below 0 once threads came too late
_UNDONE = LINE  # tasks that are not done
_OWNED = 2 * LINE  # whether a region has the threads
_CODE, _FRAME, _TASKS = (3 * LINE + i for i in range(3))  # of the region: tasks up to this number
ACTIVE, STATE, START, LOOP = (4 * LINE + i for i in range(4))  # threads; two addresses
_ASLEEP, LOCK = 5 * LINE, 5 * LINE + 1  # of thread 0; those of thread t are t lines further

NEW, RUNNING, ENDED = range(3)  # states: without threads so far, with threads, never again
SPINS = 2000  # of 16 ns on a Zen 5, up to 47 on Intel's


def _memory() -> np.ndarray:
    """The words, at the start of a cache line; they live as long as the process."""
    n_words = _ASLEEP + n_cores() * LINE
    room = np.zeros(n_words + LINE, np.int64)
    start = -(room.ctypes.data // 8) % LINE
    return room[start : start + n_words]


words = _memory()
words[ACTIVE] = n_cores()
llvm.add_symbol(SYMBOL, words.ctypes.data)

# -- what compiled code calls ----------------------------------------------------------------------


def _call(builder: Any, function: Any, *arguments: Any) -> None:
    """Call C's function of this name, or of this address in an integer."""
    kind = ir.FunctionType(ir.VoidType(), [a.type for a in arguments])
    if isinstance(function, str):
        function = cgutils.get_or_insert_function(builder.module, kind, function)
    else:
        function = builder.inttoptr(function, kind.as_pointer())
    builder.call(function, arguments)


@intrinsic
def call_task(typing: Any, code: Any, frame: Any, task: Any, thread: Any) -> Any:
    """Call the task_code function at address `code`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code, frame, task, thread = arguments
        _call(builder, code, builder.inttoptr(frame, I64.as_pointer()), task, thread)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), codegen


@intrinsic
def _call_start(typing: Any) -> Any:
    """Call `_start`, which takes the GIL for itself."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _call(builder, builder.load(word(builder, I64(START))))
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _acquire(typing: Any, lock: Any) -> Any:
    """Sleep until this lock of Python's is released."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _call(builder, ACQUIRE, builder.inttoptr(arguments[0], I8.as_pointer()), I32(1))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _release(typing: Any, lock: Any) -> Any:
    """Wake the thread that sleeps in this lock, or will."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _call(builder, RELEASE, builder.inttoptr(arguments[0], I8.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


# -- a region -------------------------------------------------------------------------------------


# Compiled into those that follow; a wrapper and a file of its own would double the time.
_part = numba.njit(**OPTIONS | {"cache": False}, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@_part
def _wake(thread):
    at = thread * LINE
    if load(_ASLEEP + at) and swap(_ASLEEP + at, 0):
        _release(load(LOCK + at))


@_part
def _wake_below(thread):
    """Wake the two threads below this one, as long as there are tasks."""
    below = 2 * thread + 1
    while below <= 2 * thread + 2 and below < load(ACTIVE) and load(_LEFT) > 0:
        _wake(below)
        below += 1


@_part
def _take_tasks(thread):
    """Run tasks until none is left."""
    done, left = 0, add(_LEFT, -1)
    while left > 0:  # one of this region's, which cannot end before it is done
        call_task(load(_CODE), load(_FRAME), load(_TASKS) - left, thread)
        done += 1
        left = add(_LEFT, -1)
    if done and add(_UNDONE, -done) == done:
        _wake(0)


@_part
def _sleep(thread, awaited):
    """Sleep until woken. Not at all if the word `awaited` is above 0 (a worker), 0 (the owner)."""
    at = thread * LINE
    store(_ASLEEP + at, 1)
    is_here = load(awaited) == 0 if thread == 0 else load(awaited) > 0 or load(STATE) == ENDED
    if is_here and swap(_ASLEEP + at, 0):
        return
    _acquire(load(LOCK + at))  # at once if another thread has woken this one meanwhile


@kernel
def work(thread):
    """What a thread of the pool does all its life."""
    spins = 0
    while load(STATE) != ENDED:
        if load(_LEFT) > 0 and thread < load(ACTIVE):
            _wake_below(thread)
            _take_tasks(thread)
            spins = 0
        elif spins < SPINS:
            pause()
            spins += 1
        else:
            _sleep(thread, _LEFT)
            spins = 0


@_part
def _own(code, frame, first, n_tasks):
    """Share out tasks first … n_tasks − 1, as the owner of the threads."""
    store(_CODE, code)
    store(_FRAME, frame)
    store(_TASKS, n_tasks)
    store(_UNDONE, n_tasks - first)
    store(_LEFT, n_tasks - first)
    _wake_below(0)
    _take_tasks(0)
    spins = 0
    while load(_UNDONE) > 0:
        if spins < SPINS:
            pause()
            spins += 1
        else:
            _sleep(0, _UNDONE)
    store(_OWNED, 0)


@kernel
def run_tasks(code, frame, n_tasks):
    """Run task_code at this address for tasks 0 … n_tasks − 1 of a frame, on all active threads."""
    if n_tasks > 1 and load(STATE) == NEW:
        _call_start()
    task = 0
    while task < n_tasks:
        if n_tasks - task > 1 and load(ACTIVE) > 1 and load(_OWNED) == 0 and swap(_OWNED, 1) == 0:
            _own(code, frame, task, n_tasks)
            return
        call_task(code, frame, task, 0)
        task += 1


@intrinsic
def _on_stack(typing: Any, values: Any) -> Any:
    """The address of a tuple, on the stack of the function that calls this."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(cgutils.alloca_once_value(builder, arguments[0]), I64)

    return types.int64(values), codegen


@kernel
def run_shares(code, n_tasks, arguments):
    """Run `code(address of the tuple of arguments, task, thread)` for tasks 0 … n_tasks − 1."""
    run_tasks(code, _on_stack(arguments), n_tasks)


# -- loops with prange ----------------------------------------------------------------------------


_LOOP_WORDS = 7


@intrinsic
def _word_at(typing: Any, address: Any) -> Any:
    """The integer at an address."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], I64.as_pointer()))

    return types.int64(types.int64), codegen


@intrinsic
def _call_share(typing: Any, loop: Any, share: Any) -> Any:
    """Call the function of a loop for one of its shares, as Numba's own layers do: each of its
    arguments moved on by its step, and a first size of 1."""

    def item(builder: Any, base: Any, i: Any) -> Any:
        return builder.gep(builder.inttoptr(base, I64.as_pointer()), [i])

    def codegen(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        numbers = [builder.load(item(builder, given[0], I64(i))) for i in range(_LOOP_WORDS)]
        function, arguments, sizes, steps, data, n_sizes, n_arguments = numbers
        own_sizes, own = builder.alloca(I64, n_sizes), builder.alloca(I64, n_arguments)
        with cgutils.for_range(builder, n_sizes) as every:
            size = builder.load(item(builder, sizes, every.index))
            builder.store(size, builder.gep(own_sizes, [every.index]))
        builder.store(I64(1), own_sizes)
        with cgutils.for_range(builder, n_arguments) as every:
            start, step = (builder.load(item(builder, x, every.index)) for x in (arguments, steps))
            moved = builder.add(start, builder.mul(step, given[1]))
            builder.store(moved, builder.gep(own, [every.index]))
        _call(builder, function, own, own_sizes, steps, data)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _share_task(loop, share, thread):
    _call_share(loop, share)


def _parallel_for(function, arguments, sizes, steps, data, n_inner, n_arguments, n_threads):
    """What Numba's compiled code calls for a loop in `n = sizes[0]` shares."""
    loop = _on_stack((function, arguments, sizes, steps, data, n_inner + 1, n_arguments))
    run_tasks(load(LOOP), loop, _word_at(sizes))


SHARE = Code(_share_task, types.void(*(types.int64,) * 3))
FOR = Code(_parallel_for, types.void(*(types.int64,) * 8))
