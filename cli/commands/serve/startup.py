"""Starts the server and stops it; imported when it is needed, as the packages of the web are."""

import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyggml.threads
from pyggml import load
from pyggml.chat import MODEL, find_template
from pyggml.cli.commands.serve.adapters import Loading
from pyggml.cli.commands.serve.app import make_app
from pyggml.cli.commands.serve.chat_page import page_routes
from pyggml.cli.commands.serve.chats import ChatWriter
from pyggml.cli.commands.serve.controls import Controls
from pyggml.cli.commands.serve.journal import Journal
from pyggml.cli.commands.serve.limits import Limits
from pyggml.cli.commands.serve.service import Service
from pyggml.cli.terminal.chat_templates import TemplateChoice, choose_template
from pyggml.cli.terminal.exit import STOPPED
from pyggml.cli.terminal.generation import CTX, n_ctx_of
from pyggml.cli.terminal.show import progress_lines, row, say, size
from pyggml.cli.web.connections import Places
from pyggml.cli.web.guard import LOOPBACK, Access
from pyggml.cli.web.listening import is_loopback, url_of
from pyggml.cli.web.server import most_connections, serve
from pyggml.errors import ModelError, TemplateError
from pyggml.generation import Batch, Context, Sampling
from pyggml.generation.form import compile_form
from pyggml.generation.serving import Idle, Scheduler, Worker
from pyggml.model import Model

MOST_CONNECTIONS = 1024  # or twice as many as there may be answers, if that is more
GRACE_SECONDS = 10  # for answers under way when the server is to stop
_NOTE = b"\nstopping when the answers under way are done, after 10 s at most; again ends at once\n"


def run(
    listening: socket.socket,
    served: Mapping[str, tuple[Model, tuple[Path, ...]]],
    sampling: Sampling,
    limits: Limits,
    context: Context,
    given: Mapping[str, Any],
) -> int:
    """Serve until a signal comes; the exit code. served: by name, models and their adapters."""
    models = {name: model for name, (model, _) in served.items()}
    name, base = next(iter(models.items()))
    n_ctx = n_ctx_of(base, limits.ctx, CTX)
    compile_form(sampling, base.tokenizer)  # one that is none is refused now
    schedule, room = _schedule(base, n_ctx, limits, context, given)
    begin = partial(pyggml.threads.set, given["threads"])
    worker = Worker(schedule, limits.parallel + limits.queue, begin)
    chosen = {
        name: choose_template(model.tokenizer, adapters, given["chat_template"])
        for name, (model, adapters) in served.items()
    }
    chats = {name: _chats(base, choice.wanted, given) for name, choice in chosen.items()}
    controls = Controls.read(given["control_vector"], given["control_vector_layers"], base)
    shifts = context.context_shift
    journal = Journal(say if given["log_requests"] else None)
    service = Service(models, worker, chats, sampling, limits, n_ctx, shifts, controls, journal)
    service.pooling, service.loading = given["pooling"], _loading(base, given)
    has_chats = any(part.encoder for part in chats.values())
    pages = page_routes(name, has_chats, sampling) if given["web"] else []
    with progress_lines():
        _say_served(chosen, controls)
        row("cache", room)
        url = url_of(listening)
        row("serving", f"{url}/v1" + (f", chat page {url}/" if pages else ""))
    app = make_app(service, _access(given), pages)
    places = Places(most_connections(max(MOST_CONNECTIONS, 2 * (limits.parallel + limits.queue))))
    serve(app, listening, _NOTE, GRACE_SECONDS, places, lambda: worker.fault is not None)
    if worker.fault is not None:
        raise worker.fault
    return STOPPED


def _schedule(
    base: Model, n_ctx: int, limits: Limits, context: Context, given: Mapping[str, Any]
) -> tuple[Scheduler | Idle, str]:
    """What answers requests, and what is said of its memory. An encoder answers none."""
    try:
        batch = Batch(base, limits.parallel, n_ctx, context.cache_types, limits.deterministic)
    except ModelError as error:
        return Idle(error), "none: it embeds texts and writes none"
    room = f"{limits.parallel} answers at once, {batch.n_ctx} tokens each"
    path = given["draft"]
    draft = path and load(path, compute=given["compute"], device=given["device"])
    return Scheduler(batch, context.n_keep, draft), f"{size(batch.memory.n_bytes)}: {room}"


def _say_served(chosen: Mapping[str, TemplateChoice], controls: Controls) -> None:
    """The model, its adapters and what is said of their templates, the control vectors."""
    for i, (name, choice) in enumerate(chosen.items()):
        row("adapter" if i else "model", name)
        for text in choice.notes if i else ():
            row("", text)
    for control in controls.words:
        row("control", control)


def _loading(base: Model, given: Mapping[str, Any]) -> Loading | None:
    """The adapters that clients may load, if they may."""
    folder = given["adapters"]
    return None if folder is None else Loading(folder, partial(_chats_with, base, given))


def _chats_with(base: Model, given: Mapping[str, Any], adapter: Path) -> ChatWriter:
    """What writes chats with an adapter, which may carry a template."""
    choice = choose_template(base.tokenizer, (adapter,), given["chat_template"])
    return _chats(base, choice.wanted, given)


def _chats(model: Model, wanted: str, given: Mapping[str, Any]) -> ChatWriter:
    """What writes chats. A model without a template serves texts; a template that was asked for
    must be one."""
    try:
        names = given["chat_template_kwargs"]
        template = find_template(model.tokenizer, wanted, names=names)
        return ChatWriter.of(template, model.tokenizer)
    except TemplateError as error:
        if given["chat_template"] or wanted != MODEL or model.tokenizer.chat_templates:
            raise
        return ChatWriter(fault=str(error))


def _access(given: Mapping[str, Any]) -> Access:
    hosts = {host.lower() for host in given["allow_host"]}
    if is_loopback(given["host"]):
        hosts |= {*LOOPBACK, given["host"].lower()}
    elif hosts:
        hosts.add(given["host"].lower())
    return Access(frozenset(hosts), given["allow_origin"], given["api_key"])
