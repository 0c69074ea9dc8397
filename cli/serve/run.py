"""Starts the server and stops it; imported when it is needed, as the packages of the web are."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn

import pyggml.threads
from pyggml.chat import ChatEncoder, answer_ending, find_template
from pyggml.cli.interrupt import stopping
from pyggml.cli.run import STOPPED
from pyggml.cli.serve.app import make_app
from pyggml.cli.serve.command import is_loopback
from pyggml.cli.serve.guard import LOOPBACK, Access
from pyggml.cli.serve.limits import Limits
from pyggml.cli.serve.page import page_routes
from pyggml.cli.serve.service import Service
from pyggml.cli.show import printable, row, size
from pyggml.errors import ConfigError, TemplateError
from pyggml.generation import Batch, Sampling
from pyggml.model import Model
from pyggml.serving import Scheduler, Worker

DEFAULT_CTX = 4096
GRACE_SECONDS = 10  # for answers under way when the server is to stop
_NOTE = b"\nstopping when the answers under way are done, after 10 s at most; again ends at once\n"


def run(
    listening: socket.socket,
    models: Mapping[str, Model],
    sampling: Sampling,
    limits: Limits,
    given: Mapping[str, Any],
) -> int:
    """Serve until a signal comes; the exit code."""
    name, base = next(iter(models.items()))
    batch = Batch(base, limits.parallel, _context(base, limits.ctx), limits.cache_type)
    begin = partial(pyggml.threads.set, given["threads"])
    worker = Worker(Scheduler(batch), limits.parallel + limits.queue, begin)
    chats = _chats(base, given["chat_template"])
    ending = answer_ending(chats.template).strip() if isinstance(chats, ChatEncoder) else ""
    service = Service(models, worker, chats, sampling, limits, batch.n_ctx, ending)
    has_chats = isinstance(chats, ChatEncoder)
    pages = page_routes(name, has_chats, sampling) if given["web"] else []
    access = _access(given)
    row("model", printable(name))
    for adapter in [*models][1:]:
        row("adapter", printable(adapter))
    room = f"{limits.parallel} answers at once, {batch.n_ctx} tokens each"
    row("cache", f"{size(batch.memory.n_bytes)}: {room}")
    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    row("serving", f"{url}/v1" + (f", chat page {url}/" if pages else ""))
    server = _Server(
        uvicorn.Config(
            make_app(service, access, pages),
            log_config=None,
            access_log=False,
            ws="none",
            server_header=False,
            h11_max_incomplete_event_size=1 << 16,
            timeout_graceful_shutdown=GRACE_SECONDS,
            limit_concurrency=4 * (limits.parallel + limits.queue) + 64,
        )
    )
    server.run(sockets=[listening])
    return STOPPED


class _Server(uvicorn.Server):
    """Stops as the other commands do: at a signal, with an exit code and without a traceback."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with stopping(self._stop, _NOTE):
            yield

    def _stop(self) -> None:
        self.should_exit = True


def _context(model: Model, wanted: int) -> int:
    most = model.config.n_ctx
    if wanted > most:
        raise ConfigError([("ctx", f"is {wanted}, wanted at most the model's {most}")])
    return wanted or min(most, DEFAULT_CTX)


def _chats(model: Model, wanted: str) -> ChatEncoder | TemplateError:
    """What writes chats. A model without a template serves texts; a template that was asked for
    must be one."""
    try:
        return ChatEncoder(find_template(model.tokenizer, wanted), model.tokenizer)
    except TemplateError as error:
        if wanted != "model" or model.tokenizer.chat_templates:
            raise
        return error


def _access(given: Mapping[str, Any]) -> Access:
    hosts = {host.lower() for host in given["allow_host"]}
    if is_loopback(given["host"]):
        hosts |= {*LOOPBACK, given["host"].lower()}
    elif hosts:
        hosts.add(given["host"].lower())
    return Access(frozenset(hosts), given["allow_origin"], given["api_key"])
