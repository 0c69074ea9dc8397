"""Points in a stream's work for which the host waits: awake at first, then asleep."""

from contextlib import suppress
from time import perf_counter
from typing import Any
from weakref import finalize

from pyggml.backends.cuda.runtime.driver import CudaAPIError, direct, driver
from pyggml.backends.cuda.runtime.simulator import on_card

_AWAKE = 2e-3  # seconds: most tokens; whoever sleeps is woken 10 to 30 µs late
_FLAGS = 1 | 2  # CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING


@on_card
class Event:
    """A point in a stream's work."""

    def __init__(self) -> None:
        self._handle = driver.cuEventCreate(_FLAGS)
        finalize(self, _destroy, self._handle).atexit = False

    def record(self, stream: Any) -> None:
        """Let the event stand behind all work that the stream has now."""
        direct.cuEventRecord(self._handle, stream.handle)

    def hold(self, stream: Any) -> None:
        """Let what a stream, also another card's, is asked for from now on wait for the event."""
        direct.cuStreamWaitEvent(stream.handle, self._handle, 0)

    def is_done(self) -> bool:
        """Whether the work up to this point is done."""
        return direct.cuEventQuery(self._handle)

    def wait(self) -> None:
        """Wait until the work up to this point is done.

        A token is waited for awake. A training step takes longer, and leaves the core to others.
        """
        until = perf_counter() + _AWAKE
        while not direct.cuEventQuery(self._handle):
            if perf_counter() > until:
                direct.cuEventSynchronize(self._handle)
                return


def _destroy(handle: Any) -> None:
    with suppress(CudaAPIError):
        driver.cuEventDestroy(handle)
