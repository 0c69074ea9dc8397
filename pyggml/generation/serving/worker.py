"""The thread that owns a scheduler: others submit and cancel, it computes while there is work."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from pyggml.errors import FileChangedError, PyggmlError
from pyggml.generation import Slot
from pyggml.generation.serving.request import Failure, Request


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


class Idle:
    """The scheduler of a model that continues no text: it refuses every request."""

    n_waiting = n_active = 0
    slots: Sequence[Slot] = ()

    def __init__(self, error: PyggmlError) -> None:
        self._error = error

    def submit(self, request: Request) -> None:
        request.tell(Failure(self._error))

    def cancel(self, request: Request) -> None:
        """No request is under way."""

    def step(self) -> bool:
        return False

    def fail(self, error: Exception) -> None:
        """No request is under way."""


class Worker:
    """Runs a scheduler in a thread of its own, and between its passes what else computes there.

    most    requests that may be under way or waiting
    begin   called first in that thread, as the number of threads is a setting of each thread
    after   called there when all that a pass brought is told
    fault   why it has ended by itself
    """

    def __init__(
        self, scheduler: Schedules, most: int, begin: Callable[[], None] = lambda: None
    ) -> None:
        self._scheduler, self._most, self._begin = scheduler, most, begin
        self.after: Callable[[], None] = lambda: None
        self._inbox: deque[tuple[Callable[[Request], None], Request]] = deque()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
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

    def call(self, compute: Callable[[], Any]) -> Future[Any]:
        """What this gives, computed in the worker's thread between two passes. Raises as `submit`;
        the future has what it raises, or WorkerClosed."""
        future: Future[Any] = Future()
        with self._changed:
            if self._closed:
                raise WorkerClosed("the server is stopping")
            if len(self._calls) >= self._most:
                raise Full(f"{len(self._calls)} are waiting already to be embedded")
            self._calls.append((future, compute))
            self._changed.notify()
        return future

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
                self._compute()
                idle = not self._scheduler.step()
            except FileChangedError as error:  # no request has an answer any more
                self.fault, self._closed = error, True
                self._scheduler.fail(error)
            except Exception as error:  # a fault of the program ends requests, not the server
                self._scheduler.fail(error)
                idle = True
            self.after()
        self._scheduler.fail(WorkerClosed("the server is stopping"))
        self.after()
        for future, _ in self._calls:
            future.cancel()
        self._count()

    def _compute(self) -> None:
        """Serve one call, so that a pass of the answers under way follows."""
        if not self._calls:
            return
        future, compute = self._calls.popleft()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(compute())
        except Exception as error:
            future.set_exception(error)
            if isinstance(error, FileChangedError):
                raise

    def _receive(self, idle: bool) -> bool:
        """Take what was sent, waiting for it if there is nothing else to do; False after close."""
        with self._changed:
            self._count()
            while idle and not (self._inbox or self._calls or self._closed):
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
