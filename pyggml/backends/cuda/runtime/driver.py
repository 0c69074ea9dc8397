"""Numba's CUDA, imported here before all else: the decorators of kernels, and captured graphs.

Under NUMBA_ENABLE_CUDASIM=1 Python threads run the kernels (`SIMULATED`); there is no capture then.
"""

from __future__ import annotations

import atexit
import importlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
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
    "ALWAYS_SHARED",
    "SIMULATED",
    "Captured",
    "CudaAPIError",
    "CudaSupportError",
    "abandon",
    "address",
    "allow_shared",
    "cuda",
    "device",
    "direct",
    "driver",
    "free_what_is_gone",
    "is_failure",
    "kernel",
    "make_current",
    "most_shared",
    "ran_out",
    "shared_cell",
    "versions",
]

SIMULATED = bool(config.ENABLE_CUDASIM)
if not SIMULATED:  # a kernel for one row has one block
    vars(importlib.import_module("numba.cuda.core.config"))["CUDA_LOW_OCCUPANCY_WARNINGS"] = 0

device: Callable[[Callable], Any] = cuda.jit(device=True)


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


def _store() -> Any:
    """The store of compiled kernels; None with a version of numba-cuda that lacks what it needs."""
    try:
        return importlib.import_module("pyggml.backends.cuda.runtime.cubins").Cubins
    except ImportError:
        return None


def kernel(function: Callable, most_threads: int = 0, shared_bytes: int = 0) -> Any:
    """A kernel, compiled when it is first launched and kept on disk (cubins.py).

    most_threads: of a block, which limits the registers of each; 0 for any number
    shared_bytes: of dynamic shared memory that a launch may ask for, if that is more than 48 KiB;
                  at most `most_shared()`
    """
    if SIMULATED:
        return cuda.jit(function)
    made = cuda.jit(launch_bounds=most_threads)(function) if most_threads else cuda.jit(function)
    store = _store()
    if store is not None:
        made._cache = store(function, shared_bytes)
    return made


ALWAYS_SHARED = 48 << 10  # bytes of dynamic shared memory without `allow_shared`
_SHARED_OF_LARGE = 227 << 10  # of a card that there is none of
_MOST_DYNAMIC = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CARVE_OUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, of a hundred


def most_shared() -> int:
    """Bytes of shared memory that a block may have on this card."""
    if _store() is None:  # which allows a kernel more
        return ALWAYS_SHARED
    try:
        return int(cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    except CudaSupportError:
        return _SHARED_OF_LARGE


def allow_shared(kernel: Any, n_bytes: int, index: int) -> None:
    """Let the launches of a kernel (its handle) on a card ask for so much dynamic shared memory.

    All such kernels ask for the same split of a multiprocessor's memory between L1 cache and shared
    memory, because its blocks must all have ended before the split can change.
    """
    from cuda.bindings.driver import CUfunction_attribute

    for attribute, value in ((_MOST_DYNAMIC, n_bytes), (_CARVE_OUT, 100)):
        driver.cuKernelSetAttribute(CUfunction_attribute(attribute), value, kernel, index)


_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: memory may be freed meanwhile
_SET = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES
_PROGRAMMATIC = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC


OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


def is_failure(error: BaseException) -> bool:
    """Whether the card, its driver or a library of NVIDIA's refused something.

    Launches raise CUDAError of cuda.core, products an error of nvmath's own.
    """
    return isinstance(error, CudaAPIError) or _package(error) in ("cuda", "nvmath")


def ran_out(error: BaseException) -> bool:
    """Whether there was not enough memory on the card.

    cuBLAS calls itself not initialised where it finds no memory for a handle.
    """
    if isinstance(error, CudaAPIError):
        return int(error.code or 0) == OUT_OF_MEMORY
    of_library = ("ALLOC_FAILED", "NOT_INITIALIZED") if _package(error) == "nvmath" else ()
    return any(word in str(error) for word in ("OUT_OF_MEMORY", *of_library))


def _package(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]


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


class Captured:
    """Calls on a stream, started at once from the second time on.

    The first time each is launched by itself: that compiles what is not compiled yet, which cannot
    be captured. The second time they are captured into a CUDA graph (1.25 µs a node, where a launch
    from Python takes 80). Calls that cannot be captured are always launched.

    waits: tells, for each call, the numbers of those that end before it begins; the card may run it
    beside all others. Without `waits` each call waits for the one before.
    early: tells, of these, which calls may begin before those have ended (early.py); where the
    driver refuses, none does.
    """

    def __init__(
        self,
        calls: Iterable[Callable[[], None]],
        stream: Any,
        waits: Callable[[], Sequence[tuple[int, ...]]] | None = None,
        early: Callable[[Sequence[tuple[int, ...]]], Sequence[bool]] | None = None,
    ) -> None:
        self.calls, self.waits, self.early = tuple(calls), waits, early
        self._stream = stream
        self._times, self._graph = 0, None

    def __call__(self) -> None:
        self._times += 1
        if self._times == 2 and not SIMULATED:
            self._graph = self._captured()
            if self._graph is None and self.early is not None:
                self.early = None
                self._graph = self._captured()
        if self._graph is None:
            self._launch()
        else:
            direct.cuGraphLaunch(self._graph, self._stream.handle)

    def _launch(self) -> None:
        for call in self.calls:
            call()

    def _launch_to_capture(self) -> None:
        """Each call's nodes get edges from the last nodes of those that it waits for."""
        if self.waits is None:
            self._launch()
            return
        last: list[list[Any]] = []  # of each call
        waits = self.waits()
        early = self.early(waits) if self.early else [False] * len(waits)
        for call, before, is_early in zip(self.calls, waits, early, strict=True):
            _set_next(self._stream, [node for i in before for node in last[i]], is_early)
            call()
            last.append(_next(self._stream))

    def _captured(self) -> Any:
        """The graph, ready to start; None if a call cannot be captured.

        Raises what the driver or a library says if there is too little memory.
        """
        from cuda.bindings.driver import CUstreamCaptureMode

        free_what_is_gone()
        stream = self._stream.handle
        driver.cuStreamBeginCapture(stream, CUstreamCaptureMode(_RELAXED))
        try:
            self._launch_to_capture()
            graph = driver.cuStreamEndCapture(stream)
        except BaseException as error:  # Ctrl-C, too
            with suppress(CudaAPIError):  # so that the stream takes launches again
                driver.cuGraphDestroy(driver.cuStreamEndCapture(stream))
            if not is_failure(error) or ran_out(error):
                raise
            return None
        try:
            made = driver.cuGraphInstantiate(graph, 0)
        except CudaAPIError as error:
            if self.early is None or ran_out(error):
                raise
            return None
        finally:
            driver.cuGraphDestroy(graph)
        weakref.finalize(self, _destroy, made).atexit = False
        return made


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


def _next(stream: Any) -> list[Any]:
    """The nodes for which the next node that is captured will wait."""
    return list(driver.cuStreamGetCaptureInfo(stream.handle)[3])


def _set_next(stream: Any, nodes: Sequence[Any], is_early: bool) -> None:
    """Let the next node that is captured wait for these, or begin early and wait by itself."""
    from cuda.bindings import driver as bindings

    nodes = list({int(node): node for node in nodes}.values())
    # Bindings of CUDA 13 also take data of each edge; those of 12 have a second name for that.
    name = "cuStreamUpdateCaptureDependencies"
    has_two = hasattr(bindings, f"{name}_v2")
    of_edges: tuple[Any, ...] = () if has_two else (None,)
    if is_early and nodes:
        edge = bindings.CUgraphEdgeData()
        edge.from_port = edge.type = _PROGRAMMATIC  # when all blocks have released others
        name, of_edges = f"{name}_v2" if has_two else name, ([edge] * len(nodes),)
    getattr(driver, name)(stream.handle, nodes, *of_edges, len(nodes), _SET)


def _destroy(graph: Any) -> None:
    with suppress(CudaAPIError):
        driver.cuGraphExecDestroy(graph)


def versions() -> tuple[tuple[int, int], tuple[int, int]]:
    """The versions of CUDA that the driver runs and that kernels are compiled for."""
    number = int(driver.cuDriverGetVersion())
    made_for = cuda.runtime.get_version()
    return (number // 1000, number % 1000 // 10), (made_for[0], made_for[1])
