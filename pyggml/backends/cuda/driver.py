"""Numba's CUDA, the only file that imports it: the decorators of kernels, and captured graphs.

Under NUMBA_ENABLE_CUDASIM=1 Python threads run the kernels (`SIMULATED`); there is no capture then.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np

# Its own .pth does this where packages lie in site-packages, not where they lie on PYTHONPATH.
with suppress(ImportError):
    importlib.import_module("_numba_cuda_redirector")
# numba-cuda 0.30 names it when imported, NumPy 2.5 has dropped it.
vars(np).setdefault("row_stack", np.vstack)

# Hence these imports come after the two lines above, not at the top.
from numba import config, cuda  # noqa: E402
from numba.cuda.cudadrv.driver import CudaAPIError, driver  # noqa: E402
from numba.cuda.cudadrv.error import CudaSupportError  # noqa: E402

__all__ = [
    "SIMULATED",
    "Captured",
    "CudaAPIError",
    "CudaSupportError",
    "cuda",
    "device",
    "driver",
    "kernel",
    "ran_out",
    "versions",
]

SIMULATED = bool(config.ENABLE_CUDASIM)

kernel: Callable[[Callable], Any] = cuda.jit
device: Callable[[Callable], Any] = cuda.jit(device=True)

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: memory may be freed meanwhile


def ran_out(error: BaseException) -> bool:
    """Whether there was not enough memory on the card."""
    return int(getattr(error, "code", 0) or 0) == OUT_OF_MEMORY


class Captured:
    """Calls that run one after the other on a stream, started at once from the second time on.

    The first time each is launched by itself: that compiles what is not compiled yet, which cannot
    be captured. The second time they are captured into a CUDA graph (1.25 µs a node, where a launch
    from Python takes 80). Calls that cannot be captured are always launched.
    """

    def __init__(self, calls: Iterable[Callable[[], None]], stream: Any) -> None:
        self._calls, self._stream = tuple(calls), stream
        self._times, self._graph = 0, None

    def __call__(self) -> None:
        self._times += 1
        if self._times == 2 and not SIMULATED:
            self._graph = self._captured()
        if self._graph is None:
            self._launch()
        else:
            driver.cuGraphLaunch(self._graph, self._stream.handle)

    def _launch(self) -> None:
        for call in self._calls:
            call()

    def _captured(self) -> Any:
        """The graph, ready to start; None if a call cannot be captured."""
        from cuda.bindings.driver import CUstreamCaptureMode

        stream = self._stream.handle
        driver.cuStreamBeginCapture(stream, CUstreamCaptureMode(_RELAXED))
        try:
            self._launch()
            graph = driver.cuStreamEndCapture(stream)
        except CudaAPIError:
            with suppress(CudaAPIError):
                driver.cuStreamEndCapture(stream)
            return None
        made = driver.cuGraphInstantiate(graph, 0)
        driver.cuGraphDestroy(graph)
        weakref.finalize(self, _destroy, made).atexit = False
        return made


def _destroy(graph: Any) -> None:
    with suppress(CudaAPIError):
        driver.cuGraphExecDestroy(graph)


def versions() -> tuple[tuple[int, int], tuple[int, int]]:
    """The versions of CUDA that the driver runs and that kernels are compiled for."""
    number = int(driver.cuDriverGetVersion())
    made_for = cuda.runtime.get_version()
    return (number // 1000, number % 1000 // 10), (made_for[0], made_for[1])
