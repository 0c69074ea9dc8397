"""Runs an application until a signal comes; imported when it is needed, as uvicorn is."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

import psutil
import uvicorn
from starlette.types import ASGIApp

from pyggml.cli.terminal.interrupt import stop_on_signals
from pyggml.cli.web.connections import Connection, Places

_ACCEPTED_AT_ONCE = 64  # connections: each takes an open file before it has a place
_MOST_PENDING = 4096  # that the system may hold until then
_TICKS_OF_A_SWEEP = 5  # of uvicorn's: half a second
_SPARE_FILES = 32 + _ACCEPTED_AT_ONCE


def serve(
    app: ASGIApp,
    listening: socket.socket,
    note: bytes,
    grace: int,
    places: Places,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Answer requests to this socket; at a first signal, tell the note and end what is under way.

    grace: seconds that answers get to end. is_over: whether it is to end without a signal
    """
    _Server(app, places, grace, note, is_over).run(sockets=[listening])


def most_connections(n: int) -> int:
    """n of them, or as many as the system's limit on open files leaves room for; the limit is
    raised where that is allowed."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return n
    n_files = n + _SPARE_FILES + psutil.Process().num_fds()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and soft < n_files:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(n_files, hard), hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return n if soft == resource.RLIM_INFINITY else max(1, n - max(0, n_files - soft))


class WatchedServer(uvicorn.Server):
    """uvicorn's server, with places for connections."""

    def __init__(self, app: ASGIApp, places: Places, grace: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(Any, partial(Connection, places)),
                log_config=None,
                access_log=False,
                ws="none",
                server_header=False,
                backlog=_ACCEPTED_AT_ONCE,
                h11_max_incomplete_event_size=1 << 16,
                timeout_graceful_shutdown=grace,
                timeout_keep_alive=cast(int, places.patience.idle),
            )
        )
        self._places = places

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_MOST_PENDING)

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_OF_A_SWEEP == 0:
            self._places.sweep(asyncio.get_running_loop().time())
        return await super().on_tick(counter)


class _Server(WatchedServer):
    """Stops as the other commands do: at a signal, with an exit code and without a traceback."""

    def __init__(
        self, app: ASGIApp, places: Places, grace: int, note: bytes, is_over: Callable[[], bool]
    ) -> None:
        super().__init__(app, places, grace)
        self._note, self._is_over = note, is_over

    async def on_tick(self, counter: int) -> bool:
        self.should_exit = self.should_exit or self._is_over()
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with stop_on_signals(self._stop, self._note):
            yield

    def _stop(self) -> None:
        self.should_exit = True
