"""What the routes share: the voices, the worker, and a request on its way through it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from pyggml.cli.commands.serve.adapters import Loading
from pyggml.cli.commands.serve.journal import Journal
from pyggml.cli.commands.serve.limits import Limits
from pyggml.cli.commands.serve.params import ChatParams, Params, TextParams
from pyggml.cli.commands.serve.voices import Voice, Voices
from pyggml.cli.web.body import Bodies
from pyggml.cli.web.errors import ApiError, of_input, program_fault, too_long
from pyggml.errors import ConfigError, FileChangedError, PyggmlError
from pyggml.generation import Completion, Piece, Sampling
from pyggml.generation.drafts import check_goes_back
from pyggml.generation.form import compile_form
from pyggml.generation.serving import (
    Failure,
    Full,
    ReadPrompt,
    Request,
    RequestExpired,
    Worker,
    WorkerClosed,
)
from pyggml.models.build import expect_next_token

Told = Piece | ReadPrompt | Failure
_LOG = logging.getLogger("pyggml.serve")


class Mail:
    """What the worker's thread tells, brought to the event loop once a pass.

    A thread of its own wakes the loop: to write into the loop's pipe it lets go of the interpreter,
    and has it again when the loop has sent all letters. Meanwhile the worker begins its next pass.
    """

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._letters: deque[tuple[Flow, int, Told]] = deque()
        self._due: SimpleQueue[bool] = SimpleQueue()  # whether to wake the loop, or to end

    def start(self) -> None:
        threading.Thread(target=self._wake, name="pyggml-mail", daemon=True).start()

    def close(self) -> None:
        """End the thread when all that is due was delivered."""
        self._due.put(False)

    def post(self, flow: Flow, i: int, told: Told) -> None:
        """In the worker's thread: something of answer i."""
        flow.first = flow.first or time.monotonic()
        self._letters.append((flow, i, told))

    def deliver(self) -> None:
        """In the worker's thread: have the loop take what was posted."""
        if self._letters:
            self._due.put(True)

    def _wake(self) -> None:
        while self._due.get():
            with suppress(RuntimeError):  # the loop was closed
                if self.loop is not None:
                    self.loop.call_soon_threadsafe(self._open)

    def _open(self) -> None:
        while self._letters:
            flow, i, told = self._letters.popleft()
            flow.take(i, told)


@dataclass(slots=True)
class Service:
    """A server's parts.

    voices     what answers, by the names of models
    worker     computes
    sampling   what a request's own fields stand in for
    shifts     whether an answer goes on where the context is full
    journal    what requests were answered
    pooling    of embeddings; None: as the model's file says
    loading    the adapters that clients may load; None: none
    bodies     of requests, as they come
    mail       what the worker tells
    """

    voices: Voices
    worker: Worker
    sampling: Sampling
    limits: Limits
    shifts: bool = False
    journal: Journal = field(default_factory=Journal)
    pooling: str | None = None
    loading: Loading | None = None
    bodies: Bodies = field(init=False)
    mail: Mail = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = Bodies(self.limits.max_body, self.limits.max_bodies)
        self.mail = Mail()
        self.worker.after = self.mail.deliver

    def chat_prompts(self, voice: Voice, params: ChatParams) -> list[np.ndarray]:
        """The prompt of a chat, n times. Raises ApiError, and TemplateError with what the template
        says of the messages."""
        chats = voice.chats
        if chats.encoder is None:
            fault = f"{chats.fault} (--chat-template)"
            raise ApiError(400, fault, "messages", "no_chat_template")
        _compile(voice, params)
        encoder = chats.encoder.with_names(params.names)
        ids = encoder.prompt(params.messages, params.tools, params.continues)
        return [self._prompt_ids(voice, ids, "messages")] * params.n

    def text_prompts(self, voice: Voice, params: TextParams) -> list[np.ndarray]:
        """The prompts, each n times."""
        _compile(voice, params)
        tokenizer = voice.model.tokenizer
        encoded = [
            tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
            for prompt in params.prompts
        ]
        checked = [self._prompt_ids(voice, ids, "prompt") for ids in encoded]
        return [ids for ids in checked for _ in range(params.n)]

    def _prompt_ids(self, voice: Voice, ids: Sequence[int], param: str) -> np.ndarray:
        if not ids:
            raise ApiError(400, "the prompt is empty, wanted at least one token", param)
        most = min(voice.n_ctx, (self.limits.max_prompt or voice.n_ctx) + 1)
        if len(ids) >= most:
            raise too_long(len(ids), most, param)
        return voice.model.check_tokens(ids)

    def flow(
        self,
        voice: Voice,
        params: Params,
        prompts: Sequence[np.ndarray],
        owner: int | None = None,
        shown: Collection[int] = (),
    ) -> Flow:
        """The answers to these prompts, submitted to the worker. owner: whose they are. shown:
        control tokens whose names are part of answers.

        Raises ApiError where too many wait, and for settings that do not fit the model.
        """
        model = voice.controls.model(voice.model, params.controls)
        most = voice.n_ctx if params.n_tokens is None else params.n_tokens
        most = min(most, self.limits.max_tokens or most)
        room = None if self.shifts else voice.n_ctx
        hows = [_with_seed(params.how, i) for i in range(len(prompts))]
        try:
            expect_next_token(model.config)
            if params.how.ngram or params.predicted:
                check_goes_back(model)
            completions = [
                Completion(model.tokenizer, how, prompt, most, room, shown, params.predicted)
                for how, prompt in zip(hows, prompts, strict=True)
            ]
        except PyggmlError as error:
            raise of_input(error) from None
        deadline = time.monotonic() + self.limits.timeout
        shared: dict[str, Any] = {"model": model, "deadline": deadline, "owner": owner}
        shared["n_likeliest"] = params.how.logprobs if params.tells_prompt else None
        requests = [
            Request(prompt=prompt, completion=completion, **shared)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        return Flow(self.worker, self.mail, requests)

    def start(self) -> None:
        self.mail.start()
        self.worker.start()

    def close(self) -> None:
        self.worker.close()
        self.mail.close()
        self.bodies.close()


def _compile(voice: Voice, params: Params) -> None:
    """Compile the answer's form here, in a thread that nobody waits for."""
    try:
        compile_form(params.how, voice.model.tokenizer)
    except PyggmlError as error:
        raise of_input(error) from None


def _with_seed(how: Sampling, i: int) -> Sampling:
    """The settings of answer i: each has a seed of its own, which follows from the one given."""
    return how if how.seed < 0 else replace(how, seed=(how.seed + i) % (1 << 64))


@contextmanager
def told_if_refused() -> Iterator[None]:
    """Inside, ApiError says that the worker takes no request: too many wait, or it ends."""
    try:
        yield
    except Full as error:
        soon = {"retry-after": "1"}
        raise ApiError(429, str(error), code="queue_full", headers=soon) from None
    except WorkerClosed as error:
        raise ApiError(503, str(error), code="stopping") from None


class Flow:
    """The answers to one request, as they come from the worker's thread."""

    def __init__(self, worker: Worker, mail: Mail, requests: Sequence[Request]) -> None:
        """Submits the requests. Raises ApiError where too many wait."""
        self._worker = worker
        self._told = list[tuple[int, Told]]()
        self._more = asyncio.Event()
        self.first: float | None = None  # time.monotonic() of the first token
        self.requests, self.completions = requests, [r.completion for r in requests]
        mail.loop = asyncio.get_running_loop()
        for i, request in enumerate(requests):
            request.tell = partial(mail.post, self, i)
        with told_if_refused():
            worker.submit(requests)

    def take(self, i: int, told: Told) -> None:
        """What was told of answer i."""
        self._told.append((i, told))
        self._more.set()

    async def batches(self) -> AsyncIterator[list[tuple[int, Piece | ReadPrompt | None]]]:
        """What has come since the last time of answer i: its pieces, before them what was read of
        its prompt, or None if its time has ended.

        Raises ApiError if an answer fails.
        """
        left = len(self.requests)
        while left:
            await self._more.wait()
            self._more.clear()
            batch, self._told = self._told, []
            events = [(i, _piece(told, self.completions[i])) for i, told in batch]
            left -= sum(told is None or told.finish is not None for _, told in events)
            yield events

    def cancel(self) -> None:
        """Free the places of all answers that have not ended."""
        self._worker.cancel(self.requests)


def _piece(told: Told, completion: Completion) -> Piece | ReadPrompt | None:
    if not isinstance(told, Failure):
        return told
    error = told.error
    if isinstance(error, RequestExpired):
        if completion.tokens:
            return None
        raise ApiError(503, str(error), code="timeout")
    if isinstance(error, FileChangedError):  # the log names the file
        said = "the model's file was changed while it was in use: the server stops"
        raise ApiError(503, said, code="stopping")
    if isinstance(error, WorkerClosed):
        raise ApiError(503, str(error), code="stopping")
    if isinstance(error, ConfigError):  # settings that leave no token
        raise of_input(error)
    if isinstance(error, PyggmlError):
        raise ApiError(500, str(error))
    _LOG.error("a request failed", exc_info=error)
    raise program_fault()
