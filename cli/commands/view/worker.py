"""One thread for what takes long, one thing after the other; it ends with the request for it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import TypeVar

from starlette.requests import Request

import pyggml.threads
from pyggml.cli.web.body import refuse_body, unless_gone
from pyggml.cli.web.errors import ApiError, of_input
from pyggml.errors import PyggmlError

T = TypeVar("T")
_MOST_WAITING = 16


class ViewWorker:
    """n_threads: those of a kernel; 0: all."""

    def __init__(self, n_threads: int = 0) -> None:
        begin = partial(pyggml.threads.set, n_threads)
        self._thread = ThreadPoolExecutor(1, "view", initializer=begin)
        self._under_way: set[Event] = set()

    async def run(self, request: Request, work: Callable[[Event], T]) -> T:
        """What `work` gives. If the client goes away, the event that it gets is set.

        Raises ApiError for a fault of the input, and if too much waits already.
        """
        if request.method == "GET":
            await refuse_body(request)  # what is left unread is taken for news of the client
        if len(self._under_way) >= _MOST_WAITING:
            raise ApiError(503, "too much is under way: wait, or close other pages")
        stop = Event()
        self._under_way.add(stop)
        try:
            loop = asyncio.get_running_loop()
            return await unless_gone(request, loop.run_in_executor(self._thread, work, stop))
        except PyggmlError as error:
            raise of_input(error) from None
        finally:
            stop.set()
            self._under_way.discard(stop)

    def close(self) -> None:
        """End what is under way, and wait for its end."""
        for stop in self._under_way:
            stop.set()
        self._thread.shutdown(cancel_futures=True)
