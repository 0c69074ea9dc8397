"""The thread that owns a scheduler: others submit and cancel, it computes while there is work."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from pyggml.errors import FileChangedError, PyggmlError
from pyggml.generation import Slot
from pyggml.generation.serving.request import Request


class Full(PyggmlError):
    """More requests than may wait."""


class WorkerClosed(PyggmlError):
    """The worker takes no more requests."""


class Schedules(Protocol):
    """The part of a Scheduler that a worker uses."""

    @property
    def n_waiting(self) -> int: ...

    @property
    def n_active(self) -> int: ...

    @property
    def slots(self) -> Sequence[Slot]: ...

    def submit(self, request: Request) -> None: ...

    def cancel(self, request: Request) -> None: ...

    def step(self) -> bool: ...

    def fail(self, error: Exception) -> None: ...


class Worker:
    """Runs a scheduler in a thread of its own.

    most    requests that may be under way or waiting
    begin   called first in that thread, as the number of threads is a setting of each thread
    fault   why it has ended by itself
    """

    def __init__(
        self, scheduler: Schedules, most: int, begin: Callable[[], None] = lambda: None
    ) -> None:
        self._scheduler, self._most, self._begin = scheduler, most, begin
        self._inbox: deque[tuple[Callable[[Request], None], Request]] = deque()
        self._n_sent = 0  # submitted, and not taken from the inbox yet
        self._changed = threading.Condition()
        self._closed = False
        self.fault: FileChangedError | None = None
        self._counts = (0, 0)
        self._thread = threading.Thread(target=self._run, name="pyggml-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def slots(self) -> Sequence[Slot]:
        """The places of answers, to look at."""
        return self._scheduler.slots

    @property
    def n_active(self) -> int:
        return self._counts[0]

    @property
    def n_waiting(self) -> int:
        return self._counts[1] + self._n_sent

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests, all or none. Raises Full, or Closed after `close`."""
        with self._changed:
            if self._closed:
                raise WorkerClosed("the server is stopping")
            if self.n_active + self.n_waiting + len(requests) > self._most:
                raise Full(f"{self.n_waiting} requests are waiting already")
            self._n_sent += len(requests)
            self._inbox += [(self._enter, request) for request in requests]
            self._changed.notify()

    def cancel(self, requests: Sequence[Request]) -> None:
        """Forget requests before the next pass; those that have ended are none."""
        with self._changed:
            self._inbox += [(self._scheduler.cancel, request) for request in requests]
            self._changed.notify()

    def close(self) -> None:
        """Fail what is under way with WorkerClosed, end the thread and wait for that."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    # -- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        self._begin()
        idle = True
        while self._receive(idle):
            try:
                idle = not self._scheduler.step()
            except FileChangedError as error:  # no request has an answer any more
                self.fault, self._closed = error, True
                self._scheduler.fail(error)
            except Exception as error:  # a fault of the program ends requests, not the server
                self._scheduler.fail(error)
                idle = True
        self._scheduler.fail(WorkerClosed("the server is stopping"))
        self._count()

    def _receive(self, idle: bool) -> bool:
        """Take what was sent, waiting for it if there is nothing else to do; False after close."""
        with self._changed:
            self._count()
            while idle and not self._inbox and not self._closed:
                self._changed.wait()
            while self._inbox:
                take, request = self._inbox.popleft()
                take(request)
            self._count()
            return not self._closed

    def _enter(self, request: Request) -> None:
        self._n_sent -= 1
        self._scheduler.submit(request)

    def _count(self) -> None:
        self._counts = self._scheduler.n_active, self._scheduler.n_waiting
