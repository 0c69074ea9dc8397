"""The servers: bodies of requests."""

import functools
import json
from collections.abc import Callable
from typing import Any

from attacks.targets.models import model
from attacks.targets.target import JSON_WORDS, Read, Target, folder
from pyggml.errors import PyggmlError


@functools.cache
def _client(command: str) -> Any:
    from starlette.testclient import TestClient

    client = TestClient(_APPS[command](), "http://localhost")
    client.__enter__()  # its life ends with the process
    return client


def serve_app() -> Any:
    """`pyggml serve` of the small model."""
    from pyggml.chat import find_template
    from pyggml.cli.commands.serve.app import make_app
    from pyggml.cli.commands.serve.chats import ChatWriter
    from pyggml.cli.commands.serve.limits import Limits
    from pyggml.cli.commands.serve.service import Service
    from pyggml.cli.commands.serve.voices import Voice, Voices
    from pyggml.cli.web.guard import Access
    from pyggml.generation import Batch, Sampling
    from pyggml.generation.serving import Scheduler, Worker

    base, limits, voices = model(), Limits(parallel=2, max_tokens=2), Voices()
    worker = Worker(Scheduler(Batch(base, 2, 256)), limits.parallel + limits.queue)
    writer = ChatWriter.of(find_template(base.tokenizer), base.tokenizer)
    voices.add("tiny", lambda: Voice("tiny", base, writer, 256))
    return make_app(Service(voices, worker, Sampling(), limits), Access())


def view_app() -> Any:
    """`pyggml view` of the small model."""
    from pyggml.cli.commands.view.app import make_app
    from pyggml.cli.commands.view.source import ViewedFile

    model()
    return make_app(ViewedFile(folder() / "model.gguf"), None)


_APPS = {"serve": serve_app, "view": view_app}


class ServerError(AssertionError):
    """An answer that blames the server."""


def _post(command: str, *paths: str) -> Read:
    """Send the input as a body; its first byte chooses the path."""

    def read(data: bytes) -> None:
        path, body = paths[data[0] % len(paths) if data else 0], data[1:]
        answer = _client(command).post(path, content=body)
        if answer.status_code >= 500:
            raise ServerError(f"{path} answered {answer.status_code}: {answer.text[:300]}")
        if answer.status_code >= 400:
            raise PyggmlError(answer.text)

    return read


def _bodies(*bodies: object) -> Callable[[], list[bytes]]:
    return lambda: [bytes([i]) + json.dumps(body).encode() for i, body in enumerate(bodies)]


_CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "temperature": 0.5,
         "top_k": 3, "logit_bias": {"3": 1.5}, "stop": ["x"], "n": 1, "logprobs": True, "seed": 1,
         "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}  # fmt: skip
_COMPLETION = {"prompt": "a", "max_tokens": 1, "stream": True, "logprobs": 2, "echo": True}
_HTTP_WORDS = (*JSON_WORDS, b'"stream":true', b'"n":', b'"repeat_penalty":1e-320', b'"min_p":')


TARGETS = (
    Target(
        "serve",
        "bodies of requests",
        _post("serve", "/v1/chat/completions", "/v1/completions"),
        _bodies(_CHAT, _COMPLETION),
        _HTTP_WORDS,
    ),
    Target(
        "view",
        "bodies of requests",
        _post("view", "/api/losses", "/api/attention"),
        _bodies({"text": "the cat"}, {"text": "the cat", "block": 0, "head": 0}),
        _HTTP_WORDS,
    ),
)
