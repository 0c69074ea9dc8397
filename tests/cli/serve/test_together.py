"""An adapter, a control vector, a form or tools, guesses of three kinds, several answers, their
log-probabilities, streams and embeddings: in one server, and in one request."""

import json

import numpy as np
import pytest
from starlette.testclient import TestClient
from tiny_models import NO_END

import pyggml as library
from pyggml.cli.commands.serve import startup
from pyggml.look.control import ControlVector

CITY = {"type": "string", "enum": ["Rome", "Oslo"]}
PLACE = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
PLACE["additionalProperties"] = False
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
FORMS = {
    "text": {"logit_bias": NO_END},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": PLACE}}},
    "tools": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
}
GUESSES = [{"ngram": True}, {"prediction": {"type": "content", "content": '{"city": "Oslo"}'}}]


@pytest.fixture(scope="module")
def directions(chatty, tmp_path_factory):
    path = tmp_path_factory.mktemp("vector") / "up.gguf"
    n = library.load(chatty).config.n_embd
    ControlVector({1: np.linspace(-6, 6, n, dtype=np.float32)}, "llama").save(path)
    return path


@pytest.fixture
def http(chatty, adapters, directions, pyggml, monkeypatch):
    pytest.importorskip("llguidance")
    apps = []
    monkeypatch.setattr(startup, "serve", lambda app, *rest: apps.append(app))
    words = ("-m", chatty, "--lora", f"red={adapters['red']}", "--draft", chatty)
    words += ("--control-vector", f"up={directions}:0", "--compute", "f32", "--port", 0)
    ended = pyggml("serve", *words)
    assert ended.code == startup.STOPPED, ended.err
    with TestClient(apps[0], base_url="http://127.0.0.1") as client:
        yield client


def told(http, body):
    """Each answer's text and calls, and how many log-probabilities came with it."""
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        choices = [(c["message"], c) for c in answer.json()["choices"]]
        chunks = {i: [choice] for i, choice in enumerate(choices)}
    else:
        chunks = {i: [] for i in range(body["n"])}
        for line in answer.text.split("\n\n"):
            for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                chunks[choice["index"]].append((choice["delta"], choice))
    texts = []
    for parts in chunks.values():
        calls = [call["function"] for said, _ in parts for call in said.get("tool_calls") or []]
        text = "".join(said.get("content") or "" for said, _ in parts)
        n = sum(len(c["logprobs"]["content"]) for _, c in parts if c.get("logprobs"))
        texts.append((text + "".join(call.get("arguments", "") for call in calls), n))
    return texts


@pytest.mark.parametrize("form", FORMS)
def test_all_of_it_in_one_request(http, form):
    """What is guessed, and that it is streamed, changes no answer; an adapter and a vector do."""
    body = {"messages": [{"role": "user", "content": "the city?"}], "model": "red", "seed": 3}
    body |= {"n": 2, "max_tokens": 150 if form != "text" else 12, "logprobs": True}
    body |= {"top_logprobs": 2, "control_vectors": {"up": 0.5}, **FORMS[form]}
    plain = told(http, body | {"draft_max": 0})
    for guesses, stream in zip(({}, *GUESSES), (False, True, True), strict=True):
        assert told(http, body | guesses | {"stream": stream}) == plain
    assert all(n > 0 for _, n in plain)
    if form == "text":
        for changed in ({"model": "tiny"}, {"control_vectors": {}}):
            assert told(http, body | changed) != plain
        vector = http.post("/v1/embeddings", json={"model": "red", "input": "the"}).json()
        assert len(vector["data"][0]["embedding"]) > 8
    else:
        assert all(json.loads(text)["city"] in ("Rome", "Oslo") for text, _ in plain)
