"""Numba's CUDA and the driver that it calls, imported here before all else.

Under NUMBA_ENABLE_CUDASIM=1 Python threads run the kernels (`SIMULATED`, see simulator.py).
"""

import atexit
import importlib
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from typing import Any

import numpy as np

# Its own .pth does this where packages lie in site-packages, not where they lie on PYTHONPATH.
with suppress(ImportError):
    importlib.import_module("_numba_cuda_redirector")
# numba-cuda 0.30 names it when imported, NumPy 2.5 has dropped it.
vars(np).setdefault("row_stack", np.vstack)

# Hence these imports come after the lines above, not at the top.
with warnings.catch_warnings():  # it makes a time without a unit, which NumPy 2.5 deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from numba import config, cuda
from numba.cuda.cudadrv.driver import CudaAPIError, driver  # noqa: E402
from numba.cuda.cudadrv.error import CudaSupportError  # noqa: E402

__all__ = [
    "SIMULATED",
    "CudaAPIError",
    "CudaSupportError",
    "abandon",
    "address",
    "allow_shared",
    "cuda",
    "direct",
    "driver",
    "free_what_is_gone",
    "make_current",
    "shared_cell",
    "versions",
]

SIMULATED = bool(config.ENABLE_CUDASIM)
if not SIMULATED:  # a kernel for one row has one block
    vars(importlib.import_module("numba.cuda.core.config"))["CUDA_LOW_OCCUPANCY_WARNINGS"] = 0


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


def address(array: Any) -> int:
    """Where the first byte of an array lies: on the card, or, as a test has it, on the host."""
    if isinstance(array, np.ndarray):
        return int(array.ctypes.data)
    if SIMULATED:
        return int(array._ary.ctypes.data)
    return int(array.__cuda_array_interface__["data"][0])


@cache
def _context(index: int) -> Any:
    """The handle of a card's context, which lasts as long as the process."""
    with cuda.gpus[index]:
        handle = cuda.current_context().handle
    atexit.register(abandon, index)  # Numba unloads a kernel once for each card, which then fails
    return handle


def make_current(index: int) -> None:
    """Let what this thread asks of the driver be meant for a card, until it names another one.

    `with cuda.gpus[index]` takes ten times as long.
    """
    if not SIMULATED:
        direct.cuCtxSetCurrent(_context(index))


def shared_cell() -> tuple[Any, np.ndarray]:
    """One int32, 0, in the host's memory: as kernels get it, and as the host sees it."""
    cell = cuda.mapped_array(1, np.int32)
    seen = cell._ary if SIMULATED else np.asarray(cell)
    seen[0] = 0
    return cell, seen


def free_what_is_gone() -> None:
    """Free the memory of arrays and modules that are gone, which Numba lets wait a while."""
    if not SIMULATED:
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


def versions() -> tuple[tuple[int, int], tuple[int, int]]:
    """The versions of CUDA that the driver runs and that kernels are compiled for."""
    number = int(driver.cuDriverGetVersion())
    made_for = cuda.runtime.get_version()
    return (number // 1000, number % 1000 // 10), (made_for[0], made_for[1])
