"""A tiny model with a chat template and two adapters, behind a server on a free port."""

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from tiny_models import NO_END

import pyggml
from pyggml.chat import find_template
from pyggml.cli.commands.serve.adapters import Loading
from pyggml.cli.commands.serve.app import make_app
from pyggml.cli.commands.serve.chat_page import page_routes
from pyggml.cli.commands.serve.chats import ChatWriter
from pyggml.cli.commands.serve.controls import Controls
from pyggml.cli.commands.serve.journal import Journal
from pyggml.cli.commands.serve.limits import Limits
from pyggml.cli.commands.serve.service import Service
from pyggml.cli.commands.serve.voices import Voice, Voices
from pyggml.cli.web.connections import Places
from pyggml.cli.web.guard import Access
from pyggml.cli.web.listening import listening, url_of
from pyggml.cli.web.server import WatchedServer
from pyggml.generation import Batch, Sampling
from pyggml.generation.serving import Scheduler, Worker
from pyggml.lora import LoraConfig, attach

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}assistant:"
)


@pytest.fixture(scope="session")
def chatty(model_with):
    """Path of the tiny model with a template and a context of 512 tokens."""
    return model_with(tokenizer__chat_template=TEMPLATE, llama__context_length=512)


@pytest.fixture(scope="session")
def adapters(chatty, tmp_path_factory):
    """Name -> path of an adapter that changes what the model says."""
    folder, found = tmp_path_factory.mktemp("adapters"), {}
    for seed, name in enumerate(("red", "blue"), 1):
        adapter = attach(pyggml.load(chatty), LoraConfig(rank=2, alpha=5.0))
        data = adapter.parameters.data
        data[:] = np.random.default_rng(seed).normal(0, 0.4, len(data))
        found[name] = folder / f"{name}.gguf"
        adapter.save(found[name])
    return found


@dataclass
class Serving:
    """A running server, and a client that talks to it."""

    url: str
    service: Service
    batch: Batch
    http: httpx.Client
    places: Places
    app: Starlette

    def chat(self, content="the ", **fields):
        return self.http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": content}], **fields},
        )

    def text(self, prompt="the ", **fields):
        return self.http.post("/v1/completions", json={"prompt": prompt, **fields})

    def said(self, *args, **fields):
        """The text of one answer to a prompt."""
        answer = self.text(*args, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def endless(self):
        """A stream that goes on until the context is full, or its client."""
        body = {"prompt": "a", "stream": True}
        return httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=600)

    def slow_down(self, seconds=0.05):
        """Let every pass take this long, as those of a larger model."""
        feed = self.batch.feed
        self.batch.feed = lambda *given: (time.sleep(seconds), feed(*given))[1]

    def until(self, condition, seconds=120):
        """Wait for something that other threads do."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.01)

    def until_let_go(self):
        """Wait until no answer has a place or waits for one: each was ended before its limit."""
        worker = self.service.worker
        self.until(lambda: (worker.n_active, worker.n_waiting) == (0, 0))
        limit = self.batch.n_ctx
        assert all(slot.n_past < limit for slot in self.batch.slots), "it wrote on"


@contextmanager
def started(
    path,
    adapters=None,
    access=None,
    places=None,
    controls=None,
    log=None,
    folder=None,
    compute="auto",
    **limits,
):
    """Answers end at their limit or their client's, as chance ends none: no end is drawn."""
    base = pyggml.load(path, compute=compute)
    limits = Limits(**{"parallel": 4, **limits})
    batch = Batch(base, limits.parallel, limits.ctx or base.config.n_ctx)
    worker = Worker(Scheduler(batch), limits.parallel + limits.queue)
    writer = ChatWriter.of(find_template(base.tokenizer), base.tokenizer)
    first = Voice("tiny", base, writer, batch.n_ctx, controls or Controls())

    def with_files(name, voice, *files):
        return voice.with_adapters(name, files, writer)

    voices = Voices()
    voices.add("tiny", lambda: first)
    for name, file in (adapters or {}).items():
        voices.add(name, partial(with_files, name, first, (file, 1.0)))
    service = Service(voices, worker, Sampling(logit_bias=NO_END), limits, journal=Journal(log))
    service.loading = folder and Loading(folder, with_files)
    app = make_app(service, access or Access(), page_routes("tiny", True, service.sampling))
    with listening("127.0.0.1", 0) as accepting:
        url = url_of(accepting)
        places = places or Places(352)
        server = WatchedServer(app, places, grace=1)
        thread = threading.Thread(target=server.run, args=([accepting],))
        thread.start()
        try:
            with httpx.Client(base_url=url, timeout=600) as http:
                serving = Serving(url, service, batch, http, places, app)
                serving.until(lambda: server.started)
                yield serving
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="package")
def server(chatty, adapters):
    """The models tiny, red and blue; four answers at once."""
    with started(chatty, adapters) as serving:
        yield serving


@pytest.fixture(scope="session")
def serve(chatty, adapters):
    """serve(**limits): a server of its own, as a context; of another model at `path`."""
    return lambda path=chatty, **given: started(path, **{"adapters": adapters, **given})
