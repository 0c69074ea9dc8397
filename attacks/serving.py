"""A server of a small model, in a process of its own, for attacks to ask."""

import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from attacks.kills import COMMAND, environment, write_inputs


@contextmanager
def serving(*options: str) -> Iterator[tuple[int, psutil.Process]]:
    """The port of a server with these options, once it answers, and its process."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        write_inputs(folder)
        words = [*COMMAND, "serve", "-m", "base.gguf", "--port", str(port), *options]
        server = subprocess.Popen(words, cwd=folder, env=environment())
        try:
            await_server(f"http://127.0.0.1:{port}")
            yield port, psutil.Process(server.pid)
        finally:
            server.terminate()
            server.wait(60)


def free_port() -> int:
    """A port that nothing listens to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def await_server(url: str) -> None:
    """Wait until a server answers. TimeoutError after a minute."""
    for _ in range(600):
        try:
            httpx.get(f"{url}/health")
            return
        except httpx.TransportError:
            time.sleep(0.1)
    raise TimeoutError(f"{url} does not answer")
