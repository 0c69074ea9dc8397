"""The driver of CUDA, by way of Numba."""

import atexit
import importlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.runtime.capability import hold_back, own_of
from pyggml.backends.cuda.runtime.simulator import on_card
from pyggml.backends.cuda.runtime.toolkit import cuda

# isort: split
from numba.cuda.cudadrv.driver import CudaAPIError, driver
from numba.cuda.cudadrv.error import CudaSupportError

__all__ = [
    "CudaAPIError",
    "CudaSupportError",
    "abandon",
    "address",
    "allow_shared",
    "copy_between",
    "cuda",
    "description_of",
    "direct",
    "driver",
    "free_what_is_gone",
    "make_current",
    "shared_cell",
    "versions",
]


class _Direct:
    """The driver's functions that each token calls. They say whether what they ask about is done.

    Those of Numba's `driver` write each call to a log, which takes longer than the call.
    """

    def __getattr__(self, name: str) -> Callable[..., bool]:
        function = getattr(importlib.import_module("cuda.bindings.driver"), name)

        def call(*arguments: Any) -> bool:
            (code,) = function(*arguments)
            if not code or code == _NOT_READY:
                return not code
            raise CudaAPIError(code, f"Call to {name} results in {code.name}")

        setattr(self, name, call)  # where the next call finds it
        return call


direct = _Direct()
_NOT_READY = 600  # CUDA_ERROR_NOT_READY


_MOST_DYNAMIC = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CARVE_OUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, of a hundred


def allow_shared(kernel: Any, n_bytes: int, index: int) -> None:
    """Let the launches of a kernel (its handle) on a card ask for so much dynamic shared memory.

    All such kernels ask for the same split of a multiprocessor's memory between L1 cache and shared
    memory, because its blocks must all have ended before the split can change.
    """
    from cuda.bindings.driver import CUfunction_attribute

    for attribute, value in ((_MOST_DYNAMIC, n_bytes), (_CARVE_OUT, 100)):
        driver.cuKernelSetAttribute(CUfunction_attribute(attribute), value, kernel, index)


@on_card
def address(array: Any) -> int:
    """Where the first byte of an array lies: on the card, or, as a test has it, on the host."""
    if isinstance(array, np.ndarray):
        return int(array.ctypes.data)
    return int(array.__cuda_array_interface__["data"][0])


@cache
def _context(index: int) -> Any:
    """The handle of a card's context, which lasts as long as the process."""
    with cuda.gpus[index]:
        handle = cuda.current_context().handle
    hold_back(driver.get_device(index))
    atexit.register(abandon, index)  # Numba unloads a kernel once for each card, which then fails
    return handle


@on_card
def make_current(index: int) -> None:
    """Let what this thread asks of the driver be meant for a card, until it names another one.

    `with cuda.gpus[index]` takes ten times as long.
    """
    direct.cuCtxSetCurrent(_context(index))


@cache
def _reach(index: int, other: int) -> None:
    """Let a card, which is current, copy from another one's memory directly, if it can; else the
    driver goes through the host's."""
    cards = (driver.get_device(i).id for i in (index, other))
    if driver.cuDeviceCanAccessPeer(*cards):
        with suppress(CudaAPIError):  # another library had it already; more cards than can be
            direct.cuCtxEnablePeerAccess(_context(other), 0)


@on_card
def copy_between(to: int, target: int, of: int, source: int, n: int, stream: Any) -> None:
    """Have a stream of card `to` copy n bytes from card `of`; both are addresses."""
    if to == of:
        direct.cuMemcpyDtoDAsync(target, source, n, stream.handle)
        return
    _reach(to, of)
    direct.cuMemcpyPeerAsync(target, _context(to), source, _context(of), n, stream.handle)


@on_card
def shared_cell() -> tuple[Any, np.ndarray]:
    """One int32, 0, in the host's memory: as kernels get it, and as the host sees it."""
    cell = cuda.mapped_array(1, np.int32)
    seen = np.asarray(cell)
    seen[0] = 0
    return cell, seen


@on_card
def free_what_is_gone() -> None:
    """Free the memory of arrays and modules that are gone, which Numba lets wait a while."""
    context = cuda.current_context()
    context.memory_manager.deallocations.clear()
    context.deallocations.clear()


@cache  # which holds what is entered until the process ends
def abandon(index: int) -> ExitStack:
    """Free nothing more of a card that is lost, or whose process ends: attempts may fail, in
    finalizers, with tracebacks. The driver frees all with the process."""
    held, context = ExitStack(), driver.get_device(index).primary_context
    if context is not None:
        held.enter_context(context.defer_cleanup())
    return held


@on_card
def versions() -> tuple[tuple[int, int], tuple[int, int]]:
    """The versions of CUDA that the driver runs and that kernels are compiled for."""
    number = int(driver.cuDriverGetVersion())
    made_for = cuda.runtime.get_version()
    return (number // 1000, number % 1000 // 10), (made_for[0], made_for[1])


@on_card
def description_of(index: int) -> tuple[str, tuple[int, int], int]:
    """The name of a card, its compute capability and the bytes of its memory."""
    card = driver.get_device(index)
    name = card.name.decode() if isinstance(card.name, bytes) else card.name
    return name, own_of(card), driver.cuDeviceTotalMem(card.id)
