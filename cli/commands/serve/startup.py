"""Starts the server and stops it; imported when it is needed, as the packages of the web are."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from pyggml.cli.commands.serve.voices import Voice, Voices
from pyggml.cli.terminal.chat_templates import choose_template
from pyggml.cli.terminal.devices import WHERE, say_placement
from pyggml.cli.terminal.exit import STOPPED
from pyggml.cli.terminal.generation import CTX, n_ctx_of
from pyggml.cli.terminal.placing import load_placed
from pyggml.cli.terminal.show import progress_lines, row, say, size
from pyggml.cli.web.connections import Places
from pyggml.cli.web.guard import LOOPBACK, Access
from pyggml.cli.web.listening import is_loopback, url_of
from pyggml.cli.web.server import most_connections, serve
from pyggml.errors import ConfigError, ModelError, PyggmlError, TemplateError
from pyggml.files import in_characters
from pyggml.generation import Batch, Context, Sampling
from pyggml.generation.form import compile_form
from pyggml.generation.serving import Idle, Relay, Scheduler, Worker
from pyggml.generation.serving.worker import Schedules
from pyggml.granted import free_memory
from pyggml.heap import give_back
from pyggml.model import Model

MOST_CONNECTIONS = 1024  # or twice as many as there may be answers, if that is more
GRACE_SECONDS = 10  # for answers under way when the server is to stop
_NOTE = b"\nstopping when the answers under way are done, after 10 s at most; again ends at once\n"


@dataclass(frozen=True, slots=True)
class Opener:
    """Opens what is served, as the options say. given: all of them."""

    given: Mapping[str, Any]
    limits: Limits
    context: Context
    sampling: Sampling

    def voices(self) -> Voices:
        """The model with its adapters, open, and those of a folder, which are opened when they are
        asked for. Raises as `voice` and `voice_with`, and ConfigError for a name that is given
        twice and for no model at all."""
        voices, files = Voices(), dict[str, list[tuple[Path, float]]]()
        if self.path is not None:
            base = self.given["alias"] or in_characters(self.path.stem)
            voices.add(base, partial(self.voice, base, self.path))
        for name, file in self.given["lora"]:
            files.setdefault(name, []).append(file)
        for name, own in files.items():
            if name in voices:
                raise ConfigError(f"--lora {name} has the name of the model itself, wanted another")
            voices.add(
                name, partial(lambda n, own: self.voice_with(n, voices[base], *own), name, own)
            )
        if self.given["models"] is not None:
            self._add_folder(voices, self.given["models"])
        return voices

    def _add_folder(self, voices: Voices, folder: Path) -> None:
        """The models of a folder. A file that is none is named, and not offered."""
        files = {self.path.resolve()} if self.path else set[Path]()
        for path in sorted(folder.glob("*.gguf")):
            name = in_characters(path.stem)
            try:
                file = self.voice(name, path).model.file.path.resolve()  # of parts the first
            except PyggmlError as error:
                row("skipped", f"{path.name}: {str(error).removeprefix(f'{path}: ')}")
                continue
            if file not in files and name in voices:
                raise ConfigError([("models", f"has {path.name}, of a name that is there already")])
            if file not in files:
                voices.offer(name, partial(self.voice, name, path))
            files.add(file)
        if not voices:
            raise ConfigError([("models", f"is {folder}, which has no model that can be served")])

    @property
    def path(self) -> Path | None:
        """The file of the model that is served whatever is asked for."""
        path: Path | None = self.given["model"]
        return path

    def voice(self, name: str, path: Path) -> Voice:
        """A model without adapters. Raises as `pyggml.load` does, and for what does not fit it."""
        where = {name: self.given[name] for name in WHERE}
        model = load_placed(partial(load, path, compute=self.given["compute"]), 1, **where)
        say_placement(model)
        compile_form(self.sampling, model.tokenizer)  # one that is none is refused now
        choice = choose_template(model.tokenizer, (), self.given["chat_template"])
        voice = Voice(name, model, _chats(model, choice.template, self.given), self._n_ctx(model))
        if path == self.path:
            vectors, layers = self.given["control_vector"], self.given["control_vector_layers"]
            voice.controls = Controls.read(vectors, layers, model)
        return voice

    def voice_with(self, name: str, base: Voice, *files: tuple[Path, float]) -> Voice:
        """The same with adapters, which may carry a template."""
        choice = choose_template(base.model.tokenizer, files, self.given["chat_template"])
        chats = _chats(base.model, choice.template, self.given)
        return base.with_adapters(name, files, chats, choice.notes)

    def scheduler(self, model: Model) -> Scheduler:
        """What answers requests of a model. Raises ModelError for an encoder: it answers none."""
        context, limits = self.context, self.limits
        base = model.with_adapters()
        batch = Batch(
            base, limits.parallel, self._n_ctx(model), context.cache_types, limits.deterministic
        )
        path = self.given["draft"] if model.file.path == self.path else None
        draft = path and load(path, compute=self.given["compute"], device=self.given["device"])
        return Scheduler(batch, context.n_keep, draft)

    def _n_ctx(self, model: Model) -> int:
        """As --ctx says; of the models of a folder at most what each has."""
        if model.file.path == self.path:
            return n_ctx_of(model, self.limits.ctx, CTX)
        return n_ctx_of(model, None, self.limits.ctx or CTX)


def run(
    listening: socket.socket,
    sampling: Sampling,
    limits: Limits,
    context: Context,
    given: Mapping[str, Any],
) -> int:
    """Serve until a signal comes; the exit code. given: the options."""
    opener = Opener(given, limits, context, sampling)
    with progress_lines():
        voices = opener.voices()
        schedule = _say_served(opener, voices)
    begin = partial(pyggml.threads.set, given["threads"])
    worker = Worker(schedule, limits.parallel + limits.queue, begin)
    journal = Journal(say if given["log_requests"] else None)
    service = Service(voices, worker, sampling, limits, context.context_shift, journal)
    service.pooling = given["pooling"]
    if given["adapters"] is not None:
        service.loading = Loading(given["adapters"], opener.voice_with)
    has_chats = bool(given["models"]) or any(voice.chats.encoder for voice in voices.values())
    pages = page_routes(next(iter(voices)), has_chats, sampling) if given["web"] else []
    with progress_lines():
        url = url_of(listening)
        row("serving", f"{url}/v1" + (f", chat page {url}/" if pages else ""))
    app = make_app(service, _access(given), pages)
    places = Places(most_connections(max(MOST_CONNECTIONS, 2 * (limits.parallel + limits.queue))))
    serve(app, listening, _NOTE, GRACE_SECONDS, places, lambda: worker.fault is not None)
    if worker.fault is not None:
        raise worker.fault
    return STOPPED


def _say_served(opener: Opener, voices: Voices) -> Schedules:
    """Say what is served, and give what answers requests."""
    for i, voice in enumerate(opened := voices.of_open_models):
        row("adapter" if i else "model", voice.name)
        for text in voice.notes:
            row("", text)
    for control in opened[0].controls.words if opened else ():
        row("control", control)
    if opener.given["draft"] and opener.limits.deterministic:
        row("draft", "unused: with --deterministic nothing is guessed")
    if folder := opener.given["models"]:
        row("models", f"of {folder}: {', '.join(n for n in voices if not voices.is_open(n))}")
        return Relay(partial(_open, opener), partial(_keep, voices), free_memory)
    try:
        schedule = opener.scheduler(opened[0].model)
    except ModelError as error:
        row("cache", "none: it embeds texts and writes none")
        return Idle(error)
    row("cache", _room(schedule))
    return schedule


def _room(schedule: Scheduler) -> str:
    batch = schedule.slots[0].batch
    room = f"{len(schedule.slots)} answers at once, {batch.n_ctx} tokens each"
    return f"{size(batch.memory.n_bytes)}: {room}"


def _open(opener: Opener, model: Model) -> Scheduler:
    """What answers requests of a model of the folder."""
    schedule = opener.scheduler(model)
    with progress_lines():
        row("opened", f"{model.file.path.name}, cache {_room(schedule)}")
    return schedule


def _keep(voices: Voices, models: Sequence[Model]) -> None:
    """Forget the other models of the folder: there is no memory for them."""
    closed = voices.keep(models)
    give_back()
    with progress_lines():
        row("closed", ", ".join(closed))


def _chats(model: Model, name: str, given: Mapping[str, Any]) -> ChatWriter:
    """What writes chats. A model without a template serves texts; a template that was asked for
    must be one."""
    try:
        names = given["chat_template_kwargs"]
        template = find_template(model.tokenizer, name, names=names)
        return ChatWriter.of(template, model.tokenizer)
    except TemplateError as error:
        if given["chat_template"] or name != MODEL or model.tokenizer.chat_templates:
            raise
        return ChatWriter(fault=str(error))


def _access(given: Mapping[str, Any]) -> Access:
    hosts = {host.lower() for host in given["allow_host"]}
    if is_loopback(given["host"]):
        hosts |= {*LOOPBACK, given["host"].lower()}
    elif hosts:
        hosts.add(given["host"].lower())
    return Access(frozenset(hosts), given["allow_origin"], given["api_key"])
