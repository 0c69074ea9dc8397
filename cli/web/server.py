"""Runs an application until a signal comes; imported when it is needed, as uvicorn is."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from pyggml.cli.terminal.interrupt import stop_on_signals

# A connection without requests stays so long: longer than clients keep theirs (httpx 5 s, aiohttp
# 15 s), else a request can be under way when its connection is closed.
_IDLE_SECONDS = 20


def serve(
    app: ASGIApp, listening: socket.socket, note: bytes, grace: int, most_connections: int
) -> None:
    """Answer requests to this socket; at a first signal, tell the note and end what is under way.

    grace: seconds that answers get to end
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        ws="none",
        server_header=False,
        h11_max_incomplete_event_size=1 << 16,
        timeout_graceful_shutdown=grace,
        limit_concurrency=most_connections,
        timeout_keep_alive=_IDLE_SECONDS,
    )
    _Server(config, note).run(sockets=[listening])


class _Server(uvicorn.Server):
    """Stops as the other commands do: at a signal, with an exit code and without a traceback."""

    def __init__(self, config: uvicorn.Config, note: bytes) -> None:
        super().__init__(config)
        self._note = note

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with stop_on_signals(self._stop, self._note):
            yield

    def _stop(self) -> None:
        self.should_exit = True
