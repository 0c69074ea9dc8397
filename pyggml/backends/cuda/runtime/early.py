"""Kernels that begin before those that they wait for have ended (programmatic dependent launch).

Between two launches a card does little: only when all blocks of one have ended are those of the
next placed, and only then do they begin to read. A kernel that begins early reads meanwhile what no
launch before it makes, such as weights. It calls `await_others`, in all threads, before it reads
anything else and before it writes at all; when that returns, those before it have ended. Then, or
when it has read most of what they made, it calls `release_others`: those that wait may begin.
As it has awaited others before, they may read early what those others made, after a fence: experts
of a token are chosen two launches before their last product. They may not where it released them
before it waited (`lead`).

The release is where it measured best. A token of Qwen3-1.7B after 512 takes, on an H100, in µs:

| | none begins early | released at once | when others have ended | when A is read |
|---|---|---|---|---|
| Q8_0 | 1446 | 1501 | 1297 | 1286 |
| Q4_K_M | 1322 | 1337 | 1206 | 1164 |

On an H200 Q4_K_M takes 784 µs where products release when A is read, and 762 when others have
ended, as they do since. With fewer than eight bits a weight attention does too, and its output's
product releases before it waits (docs/cards.md).

A multiprocessor reads a launch's arguments through a cache of its own that begins empty, 64 bytes
at a time. So such a kernel reads them before it waits, and puts a word of their bits where shared
memory is written later.

There a multiprocessor has room for two such blocks, one of this launch and one of the next, and
never for three: else two of the next share the first that is free. And all such kernels have one
carve-out (`driver.allow_shared`). Registers count for each quarter of a multiprocessor, as its
warps do: of two kernels with 96 each, twelve warps and nine find no room beside each other. Where a
single block of a launch begins late, all of its blocks have awaited others a microsecond later.
Cards before Hopper (compute capability 9.0) have no such launch.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from pyggml.backends.cuda.code.jit import ALWAYS_SHARED, device, kernel, most_shared
from pyggml.backends.cuda.code.ptx import plain
from pyggml.backends.cuda.runtime.driver import CudaSupportError, cuda, versions
from pyggml.backends.cuda.runtime.launches import launches
from pyggml.backends.cuda.runtime.simulator import on_card
from pyggml.graph.call import Call

_SINCE, _DRIVER = (9, 0), (12, 3)  # compute capability, and CUDA of the driver
_SHARED_OF_LARGE = 228 << 10  # of a multiprocessor, of a card that there is none of

await_others = plain("griddepcontrol.wait;", since=_SINCE)
release_others = plain("griddepcontrol.launch_dependents;", since=_SINCE)

Reads = Callable[[tuple[Any, ...]], Iterable[Any]]
_EARLY: WeakKeyDictionary[Any, Reads] = WeakKeyDictionary()
_LEADING: WeakSet[Any] = WeakSet()  # of them, those that begin with `lead`


def begins_early(run: Any, reads: Reads, leads: bool = False) -> Any:
    """The kernel, noted as one that calls `await_others` and `release_others`.

    reads: of a launch's arguments, the arrays that it reads before it waits
    leads: whether it releases others before it waits, by `lead`
    """
    _EARLY[run] = reads
    if leads:
        _LEADING.add(run)
    return run


@device
def follow():
    """Await others and release others at once. So begins a kernel that reads nothing before, and
    its blocks are placed while the last ones before it end."""
    await_others()
    release_others()


@device
def lead():
    """Release others, then await others: the next launch's blocks are placed, and fetch weights,
    while the last launch runs. What that one makes they must not read early."""
    release_others()
    await_others()


def follower(run: Any) -> Any:
    """The kernel, noted as one that begins with `follow`."""
    return begins_early(run, lambda arguments: ())


@cache
def early_kernel(function: Callable) -> Any:
    """A kernel of this function, which reads nothing before it waits."""
    return begins_early(kernel(function, shared_bytes=least_shared()), lambda arguments: ())


def read_early(step: Call) -> list[Any] | None:
    """The arrays that a step reads before it waits; None if it is of no such kernel."""
    for launched, arguments in launches(step):
        if launched in _EARLY:
            return list(_EARLY[launched](arguments))
    return None


def leads(step: Call) -> bool:
    """Whether a step releases others before it has awaited others."""
    return any(launched in _LEADING for launched, _ in launches(step))


def knows_early() -> bool:
    """Whether launches of this card, by this driver, can begin early."""
    if versions()[0] < _DRIVER:
        return False
    return bool(cuda.get_current_device().compute_capability >= _SINCE)


@on_card
def least_shared() -> int:
    """Bytes of dynamic shared memory that launches of such kernels ask for at least: a third of a
    multiprocessor's, so that there is no room for a third block; 0 on cards before Hopper, and
    where a kernel may not ask for more than usual."""
    if most_shared() == ALWAYS_SHARED:
        return 0
    try:
        card = cuda.get_current_device()
    except CudaSupportError:
        return _SHARED_OF_LARGE // 3
    is_late = card.compute_capability >= _SINCE
    return int(card.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR) // 3 if is_late else 0
