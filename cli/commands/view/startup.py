"""Starts the server and stops it; imported when it is needed, as the packages of the web are."""

import socket

from pyggml.cli.commands.view.app import make_app
from pyggml.cli.commands.view.runs import Runs
from pyggml.cli.commands.view.source import NoSource, ViewedFile
from pyggml.cli.terminal.exit import STOPPED
from pyggml.cli.terminal.show import progress_lines, row
from pyggml.cli.web.connections import Places
from pyggml.cli.web.listening import url_of
from pyggml.cli.web.server import serve

_GRACE_SECONDS, _MOST_CONNECTIONS = 2, 64
_NOTE = b"\nstopping\n"


def run(
    listening: socket.socket, source: ViewedFile | NoSource, runs: Runs | None, n_threads: int
) -> int:
    """Serve until a signal comes; the exit code."""
    with progress_lines():
        is_file = isinstance(source, ViewedFile)
        row("model", source.name if is_file else f"none: {source.fault}")
        if is_file and source.fault:
            row("", f"only the file is shown: {source.fault}")
        if runs is not None:
            row("runs", ", ".join(runs.names()) or f"none yet in {runs.folder}")
        row("view", f"{url_of(listening)}/   (Ctrl-C ends it)")
    places = Places(_MOST_CONNECTIONS)
    serve(make_app(source, runs, n_threads), listening, _NOTE, _GRACE_SECONDS, places)
    return STOPPED
