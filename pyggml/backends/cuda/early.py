"""Kernels that begin before those that they wait for have ended (programmatic dependent launch).

Such a kernel calls `await_others` before it touches what others write, and does before what needs
none of it: its blocks are placed, its weights on their way. It calls `release_others` when those
after it may do the same. Cards before Hopper (compute capability 9.0) start it when all have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from pyggml.backends.cuda import byte_ptx
from pyggml.backends.cuda.driver import SIMULATED, CudaSupportError, cuda, device
from pyggml.backends.cuda.launch import launches
from pyggml.call import Call

_SINCE = (9, 0)
_EARLY: WeakSet[Any] = WeakSet()


def _has_waiting() -> bool:
    """Whether the card knows of it; where there is none, kernels are compiled for one that does."""
    if SIMULATED:
        return False
    try:
        return bool(cuda.get_current_device().compute_capability >= _SINCE)
    except CudaSupportError:
        return True


@device
def _nothing():
    pass


def waiting() -> tuple[Any, Any]:
    """The device functions `await_others` and `release_others`."""
    return (byte_ptx.await_grid, byte_ptx.release_grid) if _has_waiting() else (_nothing, _nothing)


def begins_early(kernel: Any) -> Any:
    """The kernel, noted as one that calls `await_others` in all its threads."""
    _EARLY.add(kernel)
    return kernel


def begin_early(steps: Sequence[Call], waits: Sequence[Sequence[int]]) -> list[bool]:
    """Which of the steps may begin early: such kernels that wait for kernels alone."""
    if not _has_waiting():
        return [False] * len(steps)
    found = [[kernel for kernel, _ in launches(step)] for step in steps]
    return [
        any(kernel in _EARLY for kernel in mine) and all(found[i] for i in before)
        for mine, before in zip(found, waits, strict=True)
    ]
