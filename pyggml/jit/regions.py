"""Regions: a number of tasks that the threads of pyggml.jit.pool share out among themselves.

A region's owner writes what its tasks are into the words below, then the region's number. Of T
threads, thread t has a share of its own, tasks t, t + T, t + 2T …, and a word in which it says how
many tasks it has done; then it takes what others have left. No word is written by all threads, so a
region hardly costs more on many threads than on few. The owner waits for tasks that were taken,
never for a thread that sleeps or that the system lets wait: so a region costs little where other
processes want the cores.

A thread without tasks looks for them for some 40 µs (SPINS), then sleeps in a lock of Python's:
three calls that are the same on Linux, macOS and Windows and need no GIL. It is woken, if it has a
share, by the thread above it in a tree of which the owner is the root.

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

from pyggml.jit.atomics import SYMBOL, exchange_if, load, pause, store, swap, word, write
from pyggml.jit.code import Code
from pyggml.jit.cores import n_cores
from pyggml.jit.decorators import OPTIONS, kernel
from pyggml.jit.llvm import I8, I32, I64, instruction

ACQUIRE, RELEASE = "PyThread_acquire_lock", "PyThread_release_lock"  # C functions of Python's

# Words of 64 bits; those that several threads wait for are two cache lines apart, as CPUs fetch
# pairs of lines.
LINE = 16
_OWNED = 0  # whether a region has the threads
# The region's number, odd while the rest of its line is written; its code and frame, its first
# task, how many tasks there are, and how many threads have a share of them.
_REGION, _CODE, _FRAME, _FIRST, _TASKS, _PARTS = (LINE + i for i in range(6))
ACTIVE, STATE, START, LOOP = (2 * LINE + i for i in range(4))  # threads; two addresses
# Of thread 0; those of thread t are t · THREAD words further. Of a share: its region's number and,
# in the lowest BITS, tasks that were taken; likewise those that the thread has done of any share.
_ASLEEP, LOCK = 3 * LINE, 3 * LINE + 1
_SHARE, _DONE = 4 * LINE, 5 * LINE
THREAD = 3 * LINE
_BITS = 20
_MOST = (1 << _BITS) - 1  # tasks of a region; more make several

NEW, RUNNING, ENDED = range(3)  # states: without threads so far, with threads, never again
SPINS = 2000  # of 16 ns on a Zen 5, up to 47 on Intel's
PATIENCE = 32  # spins until the tasks of a thread that has not come are others' too


def _memory() -> np.ndarray:
    """The words, at the start of a cache line; they live as long as the process."""
    n_words = _ASLEEP + n_cores() * THREAD
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


@instruction(types.void(*(types.int64,) * 4))
def call_task(builder: Any, code: Any, frame: Any, task: Any, thread: Any) -> None:
    """Call the task_code function at address `code`."""
    _call(builder, code, builder.inttoptr(frame, I64.as_pointer()), task, thread)


@instruction(types.void())
def _call_start(builder: Any) -> None:
    """Call `_start`, which takes the GIL for itself."""
    _call(builder, builder.load(word(builder, I64(START))))


@instruction(types.void(types.int64))
def _acquire(builder: Any, lock: Any) -> None:
    """Sleep until this lock of Python's is released."""
    _call(builder, ACQUIRE, builder.inttoptr(lock, I8.as_pointer()), I32(1))


@instruction(types.void(types.int64))
def _release(builder: Any, lock: Any) -> None:
    """Wake the thread that sleeps in this lock, or will."""
    _call(builder, RELEASE, builder.inttoptr(lock, I8.as_pointer()))


# -- a region -------------------------------------------------------------------------------------


# Compiled into those that follow; a wrapper and a file of its own would double the time.
_part = numba.njit(**OPTIONS | {"cache": False}, no_cpython_wrapper=True)


@_part
def _wake(thread):
    at = thread * THREAD
    if load(_ASLEEP + at) and swap(_ASLEEP + at, 0):
        _release(load(LOCK + at))


@_part
def _wake_below(thread, n_parts):
    """Wake the two threads below this one that have shares."""
    for below in range(2 * thread + 1, min(2 * thread + 3, n_parts)):
        _wake(below)


@_part
def _take(share, region, size):
    """One more task of a thread's share: its place there, or −1 if all are taken."""
    at, start = _SHARE + share * THREAD, region << _BITS
    seen = load(at)
    while True:
        taken = max(seen - start, 0)  # below 0: of an older region, which had been done
        if taken >= size:  # a newer region's too
            return -1
        before = exchange_if(at, seen, start + taken + 1)
        if before == seen:
            return taken
        seen = before


@_part
def _run_share(share, thread, region, code, frame, first, n_tasks, n_parts):
    """Run what is left of a thread's share; how many tasks these were."""
    size = (n_tasks - share + n_parts - 1) // n_parts
    done, i = 0, _take(share, region, size)
    while i >= 0:
        call_task(code, frame, first + share + i * n_parts, thread)
        done += 1
        i = _take(share, region, size)
    return done


@_part
def _run_others(thread, region, code, frame, first, n_tasks, n_parts):
    """Run what is left of the other threads' shares; how many tasks these were."""
    done = 0
    for i in range(1, n_parts):
        if load(_REGION) != region:
            break
        other = (thread + i) % n_parts
        done += _run_share(other, thread, region, code, frame, first, n_tasks, n_parts)
    return done


@_part
def _say(thread, region, done):
    """Tell the owner how many tasks this thread has done."""
    if done:
        store(_DONE + thread * THREAD, (region << _BITS) + done)
        _wake(0)


@_part
def _take_part(thread, region):
    """Run tasks of this region, if it is still the one; whether the thread had a share."""
    code, frame, first = load(_CODE), load(_FRAME), load(_FIRST)
    n_tasks, n_parts = load(_TASKS), load(_PARTS)
    if load(_REGION) != region or thread >= n_parts:
        return False
    _wake_below(thread, n_parts)
    done = _run_share(thread, thread, region, code, frame, first, n_tasks, n_parts)
    _say(thread, region, done)
    for _ in range(PATIENCE):
        if load(_REGION) != region:
            return True
        pause()
    more = _run_others(thread, region, code, frame, first, n_tasks, n_parts)
    if more:
        _say(thread, region, done + more)
    return True


@_part
def _sleep(thread, is_awaited):
    """Sleep until woken, the word _ASLEEP having been set; not at all if what it waits for has
    come since then."""
    at = thread * THREAD
    if is_awaited and swap(_ASLEEP + at, 0):
        return
    _acquire(load(LOCK + at))  # at once if another thread has woken this one meanwhile


@kernel
def work(thread):
    """What a thread of the pool does all its life."""
    spins, region = 0, 0
    while load(STATE) != ENDED:
        newest = load(_REGION)
        if newest != region and newest & 1 == 0:
            region = newest
            if _take_part(thread, region):
                spins = 0
        elif spins < SPINS:
            pause()
            spins += 1
        else:
            store(_ASLEEP + thread * THREAD, 1)
            _sleep(thread, load(_REGION) != region or load(STATE) == ENDED)
            spins = 0


@_part
def _done_by_others(region, n_parts):
    done = 0
    for thread in range(1, n_parts):
        done += max(load(_DONE + thread * THREAD) - (region << _BITS), 0)
    return done


@_part
def _own(code, frame, first, n_tasks):
    """Share out this many tasks from the first on, as the owner of the threads."""
    n_parts, region = min(n_tasks, load(ACTIVE)), load(_REGION) + 2
    store(_REGION, region - 1)
    write(_CODE, code)
    write(_FRAME, frame)
    write(_FIRST, first)
    write(_TASKS, n_tasks)
    write(_PARTS, n_parts)
    store(_REGION, region)
    _wake_below(0, n_parts)
    done = _run_share(0, 0, region, code, frame, first, n_tasks, n_parts)
    spins = 0
    while done + _done_by_others(region, n_parts) < n_tasks:
        if spins == PATIENCE:
            done += _run_others(0, region, code, frame, first, n_tasks, n_parts)
        if spins < SPINS:
            pause()
            spins += 1
        else:
            store(_ASLEEP, 1)
            _sleep(0, done + _done_by_others(region, n_parts) == n_tasks)


@kernel
def run_tasks(code, frame, n_tasks):
    """Run task_code at this address for tasks 0 … n_tasks − 1 of a frame, on all active threads."""
    if n_tasks > 1 and load(STATE) == NEW:
        _call_start()
    task = 0
    while task < n_tasks:
        n = 1
        if n_tasks - task > 1 and load(ACTIVE) > 1 and load(_OWNED) == 0 and swap(_OWNED, 1) == 0:
            n = min(n_tasks - task, _MOST)
            _own(code, frame, task, n)
            store(_OWNED, 0)
        else:
            call_task(code, frame, task, 0)
        task += n


@instruction(types.int64(types.int64))
def _word_at(builder: Any, address: Any) -> Any:
    """The integer at an address."""
    return builder.load(builder.inttoptr(address, I64.as_pointer()))


@kernel
def run_all(regions, first):
    """The same for regions one after the other, from this one on: (code, frame, tasks, address of
    the word that says how many tasks there are, or 0) of each. The number of the first that has
    fewer than none, where it stops; else how many regions there are."""
    for i in range(first, len(regions)):
        code, frame, n_tasks, says = regions[i]
        if says:
            n_tasks = _word_at(says)
        if n_tasks < 0:
            return i
        run_tasks(code, frame, n_tasks)
    return len(regions)


@instruction(lambda values: types.int64(values))
def _on_stack(builder: Any, values: Any) -> Any:
    """The address of a tuple, on the stack of the function that calls this."""
    return builder.ptrtoint(cgutils.alloca_once_value(builder, values), I64)


# -- loops with prange ----------------------------------------------------------------------------


_LOOP_WORDS = 7


def _item(builder: Any, base: Any, i: Any) -> Any:
    return builder.gep(builder.inttoptr(base, I64.as_pointer()), [i])


@instruction(types.void(types.int64, types.int64))
def _call_share(builder: Any, loop: Any, share: Any) -> None:
    """Call the function of a loop for one of its shares, as Numba's own layers do: each of its
    arguments moved on by its step, and a first size of 1."""
    numbers = [builder.load(_item(builder, loop, I64(i))) for i in range(_LOOP_WORDS)]
    function, arguments, sizes, steps, data, n_sizes, n_arguments = numbers
    own_sizes, own = builder.alloca(I64, n_sizes), builder.alloca(I64, n_arguments)
    with cgutils.for_range(builder, n_sizes) as every:
        size = builder.load(_item(builder, sizes, every.index))
        builder.store(size, builder.gep(own_sizes, [every.index]))
    builder.store(I64(1), own_sizes)
    with cgutils.for_range(builder, n_arguments) as every:
        start, step = (builder.load(_item(builder, x, every.index)) for x in (arguments, steps))
        moved = builder.add(start, builder.mul(step, share))
        builder.store(moved, builder.gep(own, [every.index]))
    _call(builder, function, own, own_sizes, steps, data)


def _share_task(loop, share, thread):
    _call_share(loop, share)


def _parallel_for(function, arguments, sizes, steps, data, n_inner, n_arguments, n_threads):
    """What Numba's compiled code calls for a loop in `n = sizes[0]` shares."""
    loop = _on_stack((function, arguments, sizes, steps, data, n_inner + 1, n_arguments))
    run_tasks(load(LOOP), loop, _word_at(sizes))


SHARE = Code(_share_task, types.void(*(types.int64,) * 3))
FOR = Code(_parallel_for, types.void(*(types.int64,) * 8))
