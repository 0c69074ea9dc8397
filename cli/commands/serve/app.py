"""The routes: OpenAI's, /health, those of operators, and the page."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pyggml.cli.commands.serve.adapters import AdapterRoutes
from pyggml.cli.commands.serve.answers import AnswerForm, PartialAnswer, TextForm, Usage
from pyggml.cli.commands.serve.chat_answers import ChatForm
from pyggml.cli.commands.serve.embeddings import EmbedRoutes
from pyggml.cli.commands.serve.journal import Cost, Entry, JournalMiddleware
from pyggml.cli.commands.serve.operators import OperatorRoutes
from pyggml.cli.commands.serve.params import Params, TextParams, read_chat, read_text
from pyggml.cli.commands.serve.response_answers import ResponseForm
from pyggml.cli.commands.serve.responses import chat_of, echo_of
from pyggml.cli.commands.serve.service import Flow, Service
from pyggml.cli.commands.serve.voices import Voice
from pyggml.cli.web.body import unless_gone
from pyggml.cli.web.errors import HANDLERS, ApiError
from pyggml.cli.web.guard import Access, Guard


def make_app(service: Service, access: Access, pages: Sequence[Route] = ()) -> Starlette:
    """The application; pages: routes of the chat page."""
    routes = ServeRoutes(service)
    own = [
        Route("/health", routes.health),
        Route("/v1/models", routes.models),
        Route("/v1/models/{name:path}", routes.model),
        Route("/v1/chat/completions", routes.chat, methods=["POST"]),
        Route("/v1/completions", routes.text, methods=["POST"]),
        Route("/v1/responses", routes.respond, methods=["POST"]),
        *OperatorRoutes(service).routes,
        *EmbedRoutes(service).routes,
        *AdapterRoutes(service).routes,
    ]
    middleware = [Middleware(Guard, access=access)]
    if access.origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=[*access.origins],
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
            )
        )

    paths = frozenset(route.path for route in own)
    middleware.append(Middleware(JournalMiddleware, journal=service.journal, paths=paths))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        await asyncio.to_thread(service.close)

    return Starlette(
        routes=[*own, *pages], middleware=middleware, exception_handlers=HANDLERS, lifespan=lifespan
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read.

    prefixes   what each answer begins with
    shown      control tokens whose names are part of answers
    """

    voice: Voice
    params: Params
    prompts: Sequence[np.ndarray]
    form: AnswerForm
    prefixes: Sequence[str]
    shown: Collection[int] = ()


class ServeRoutes:
    """What answers each path."""

    def __init__(self, service: Service) -> None:
        self._service, self._created = service, int(time.time())

    async def health(self, request: Request) -> Response:
        """How busy the server is, strangers do not learn."""
        if request.state.holder is None:
            return JSONResponse({"status": "ok"})
        worker = self._service.worker
        counts = {"active": worker.n_active, "waiting": worker.n_waiting}
        return JSONResponse({"status": "ok", **counts})

    async def models(self, request: Request) -> Response:
        data = [self._model(name) for name in self._service.voices]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._service.voices:
            raise ApiError(404, "there is no model of this name", "model", "model_not_found")
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        """created: when this server was started; status: as llama-server has it of several."""
        status = "loaded" if self._service.voices.is_open(name) else "unloaded"
        about = {"id": name, "object": "model", "created": self._created, "owned_by": "pyggml"}
        return {**about, "status": {"value": status}}

    async def chat(self, request: Request) -> Response:
        def read(given: dict[str, Any]) -> Asked:
            return self._chat_of(given, ChatForm)

        return await self._answer(request, await self._service.bodies.read(request, read))

    async def respond(self, request: Request) -> Response:
        def read(given: dict[str, Any]) -> Asked:
            chat, echo = chat_of(given), echo_of(given)
            return self._chat_of(chat, partial(ResponseForm, echo=echo))

        return await self._answer(request, await self._service.bodies.read(request, read))

    def _chat_of(self, given: dict[str, Any], form_of: Callable[..., AnswerForm]) -> Asked:
        """form_of: of the model's name, its tokenizer, and what makes readers of answers."""
        service = self._service
        params = read_chat(given, service.sampling, service.limits)
        voice = service.voices.ask(params.model)
        predicted = voice.model.tokenizer.encode(params.prediction, add_special=False)
        params = replace(params, how=voice.chats.sampling(params), predicted=predicted)
        prompts = service.chat_prompts(voice, params)
        reader = voice.chats.reader(params, prompts[0])
        form = form_of(voice.name, voice.model.tokenizer, reader)
        return Asked(voice, params.alone(), prompts, form, [""] * params.n, voice.chats.shown)

    async def text(self, request: Request) -> Response:
        service = self._service

        def read(given: dict[str, Any]) -> Asked:
            params = read_text(given, service.sampling, service.limits)
            voice = service.voices.ask(params.model)
            prompts = service.text_prompts(voice, params)
            form = TextForm(voice.name, voice.model.tokenizer)
            return Asked(voice, params.alone(), prompts, form, _echo_texts(params, voice))

        return await self._answer(request, await service.bodies.read(request, read))

    async def _answer(self, request: Request, asked: Asked) -> Response:
        service, form = self._service, asked.form
        owner = None if service.limits.share_prompts else request.state.holder
        flow = service.flow(asked.voice, asked.params, asked.prompts, owner, asked.shown)
        entry: Entry = request.state.entry
        entry.cost = partial(_cost, form.model, flow)
        if asked.params.stream:
            return EventStream(flow, _events(flow, form, asked.prefixes, asked.params))
        choices = [PartialAnswer(prefix) for prefix in asked.prefixes]
        try:
            await unless_gone(request, _collect(flow, choices))
        finally:
            flow.cancel()
        return JSONResponse(form.whole(choices, _usage(flow)))


def _echo_texts(params: TextParams, voice: Voice) -> list[str]:
    """What each answer begins with."""
    if not params.echo:
        return [""] * (len(params.prompts) * params.n)
    tokenizer = voice.model.tokenizer
    texts = [p if isinstance(p, str) else tokenizer.decode(p) for p in params.prompts]
    return [text for text in texts for _ in range(params.n)]


# -- answers in one piece -----------------------------------------------------------------------


async def _collect(flow: Flow, choices: list[PartialAnswer]) -> None:
    async for batch in flow.batches():
        for i, told in batch:
            choices[i].add(told)


def _cost(model: str, flow: Flow) -> Cost:
    reasons = [c.finish.reason if c.finish else None for c in flow.completions]
    return Cost(model, _usage(flow), flow.first, reasons)


def _usage(flow: Flow) -> Usage:
    """Of all answers; a prompt with several is counted once."""
    requests = {id(r.prompt): r for r in reversed(flow.requests)}.values()
    n_answer = sum(len(completion.tokens) for completion in flow.completions)
    return Usage(sum(len(r.prompt) for r in requests), sum(r.n_cached for r in requests), n_answer)


# -- streams ------------------------------------------------------------------------------------


class EventStream(StreamingResponse):
    """Server-sent events. However it ends, also where the client closes the connection, the places
    of its answers are free then."""

    media_type = "text/event-stream"

    def __init__(self, flow: Flow, events: AsyncIterator[bytes]) -> None:
        super().__init__(events)
        self._flow = flow

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._flow.cancel()


async def _events(
    flow: Flow, form: AnswerForm, prefixes: Sequence[str], params: Params
) -> AsyncIterator[bytes]:
    """The events, several at once where several are ready. A prompt whose own tokens are told comes
    with them."""
    try:
        first = [""] * len(prefixes) if params.tells_prompt else prefixes
        opened = [form.opening(i, prefix) for i, prefix in enumerate(first)]
        if start := b"".join(form.event(part) for parts in opened for part in parts):
            yield start
        async for batch in flow.batches():
            parts = (part for i, told in batch for part in form.chunks(i, told, prefixes[i]))
            if told := b"".join(map(form.event, parts)):
                yield told
        last = form.closing(_usage(flow), params.include_usage)
        if end := b"".join(map(form.event, last)) + form.done:
            yield end
    except ApiError as error:  # the status is sent already
        yield form.event(form.fault(error))
