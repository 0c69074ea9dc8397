"""Points in a stream's work for which the host waits: awake at first, then asleep."""

from contextlib import suppress
from time import perf_counter
from typing import Any
from weakref import finalize

from pyggml.backends.cuda.runtime.driver import SIMULATED, CudaAPIError, direct, driver

_AWAKE = 2e-3  # seconds: most tokens; whoever sleeps is woken 10 to 30 µs late
_FLAGS = 1 | 2  # CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING


class Event:
    """A point in a stream's work. The simulator does all work at once and needs none."""

    def __init__(self) -> None:
        if not SIMULATED:
            self._handle = driver.cuEventCreate(_FLAGS)
            finalize(self, _destroy, self._handle).atexit = False

    def record(self, stream: Any) -> None:
        """Let this be the point up to which the stream has work now."""
        if not SIMULATED:
            direct.cuEventRecord(self._handle, stream.handle)

    def wait(self) -> None:
        """Wait until the work up to this point is done.

        A token is waited for awake. A training step takes longer, and leaves the core to others.
        """
        if SIMULATED:
            return
        until = perf_counter() + _AWAKE
        while not direct.cuEventQuery(self._handle):
            if perf_counter() > until:
                direct.cuEventSynchronize(self._handle)
                return


def _destroy(handle: Any) -> None:
    with suppress(CudaAPIError):
        driver.cuEventDestroy(handle)
