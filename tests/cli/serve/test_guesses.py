"""Guessed tokens of a server: an answer is the one without, whatever else it has."""

import json
from functools import partial

import numpy as np
import pytest

import pyggml
from pyggml.cli.commands.serve.controls import Controls
from pyggml.generation.gain import PassCosts
from pyggml.look.control import ControlVector

PROMPT = "the cat saw the cat saw the cat saw the "


@pytest.fixture(scope="module")
def guessing(serve, chatty, tmp_path_factory):
    """A server with a control vector; in float32 passes of any size give the same to 1e-5."""
    path = tmp_path_factory.mktemp("vector") / "up.gguf"
    n = pyggml.load(chatty).config.n_embd
    ControlVector({1: np.full(n, 4, np.float32)}, "llama").save(path)
    controls = Controls.read([("up", (path, 0.0))], None, pyggml.load(chatty))
    with serve(controls=controls, compute="f32") as s:
        yield s


def told(server, **fields):
    """The texts of a stream, by answer, and why each ended."""
    body = {"prompt": PROMPT, "max_tokens": 24, "stream": True, "seed": 3, **fields}
    body["logit_bias"] = {"t": 9, "h": 9, "e": 9}  # so that answers repeat themselves
    texts, reasons = {}, {}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                i = choice["index"]
                texts[i] = texts.get(i, "") + choice["text"]
                reasons[i] = choice["finish_reason"]
    return texts, reasons


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1.5, "n": 3, "model": "red"},
        {"temperature": 0.7, "n": 2, "control_vectors": {"up": 1.0}},
        {"temperature": 1, "n": 2, "model": "blue", "regex": "(the cat |saw ){3}[a-c]{5,20}"},
    ],
    ids=["greedy", "adapter", "control vector", "form"],
)
def test_a_stream_is_the_one_without_guesses(guessing, fields, monkeypatch):
    """Prompts of several answers share the cache; the second time it is there as a whole."""
    if "regex" in fields:
        pytest.importorskip("llguidance")
    monkeypatch.setattr(PassCosts, "lengths", lambda self, n, offers: [o.most for o in offers])
    ask = partial(told, guessing, **fields)
    speculator = guessing.service.worker._scheduler._speculator
    plain, before = ask(), speculator.n_drafted
    assert ask(ngram=True) == plain and speculator.n_drafted > before
    assert len(plain[0]) == fields.get("n", 1)
