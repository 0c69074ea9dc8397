"""Points in a stream's work for which the host waits: awake where that is short, else asleep, and
awake again when the end is near, as far as that is known."""

from contextlib import suppress
from time import perf_counter, sleep
from typing import Any
from weakref import finalize

from pyggml.backends.cuda.runtime.driver import CudaAPIError, direct, driver
from pyggml.backends.cuda.runtime.simulator import on_card

_AWAKE = 2e-3  # seconds: most tokens; whoever sleeps is woken 10 to 30 µs late
# seconds: of a wait that is slept through but for its end, and that end
_LONG, _LONGEST, _NEAR = 4e-3, 1.0, 1.2e-3
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

    def wait(self, before: float = 0.0) -> float:
        """Wait until the work up to this point is done; returns the seconds that it took, 0 if the
        end was slept through.

        A token is waited for awake. A training step takes longer, and leaves the core to others:
        if such a wait took so many seconds before, until it is nearly done.
        """
        began = perf_counter()
        if _LONG < before < _LONGEST and not self.is_done():
            sleep(before - _NEAR)
            if self.is_done():
                return 0.0
        until = perf_counter() + _AWAKE
        while not direct.cuEventQuery(self._handle):
            if perf_counter() > until:
                direct.cuEventSynchronize(self._handle)
                break
        return perf_counter() - began


def _destroy(handle: Any) -> None:
    with suppress(CudaAPIError):
        driver.cuEventDestroy(handle)
