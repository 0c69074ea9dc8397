"""What operators ask: tokens, settings, slots, metrics, the log of requests, keys of a file."""

import json
import re

import pytest

import pyggml
from pyggml.cli.commands.serve.command import keys_of
from pyggml.cli.web.guard import Access
from pyggml.errors import ConfigError

KEYED = ["/props", "/slots", "/metrics", "/tokenize", "/detokenize"]


def test_tokens_of_a_text_and_back(server, chatty):
    ids = pyggml.load(chatty).tokenizer.encode("the other", add_special=False)
    told = server.http.post("/tokenize", json={"content": "the other"}).json()
    assert told == {"tokens": ids}
    pieces = server.http.post("/tokenize", json={"content": "ü", "with_pieces": True}).json()
    raw = b"".join(
        piece.encode() if isinstance(piece := each["piece"], str) else bytes(piece)
        for each in pieces["tokens"]
    )
    assert raw.decode().strip() == "ü"
    assert server.http.post("/detokenize", json={"tokens": ids}).json()["content"] == "the other"
    for body in ({}, {"tokens": [1 << 40]}, {"tokens": "a"}, {"tokens": [], "x": 1}):
        assert server.http.post("/detokenize", json=body).status_code == 400


def test_settings_and_slots(server):
    props = server.http.get("/props").json()
    assert props["total_slots"] == 4 and props["default_generation_settings"]["n_ctx"] == 512
    assert props["models"] == ["tiny", "red", "blue"] and "m.role" in props["chat_template"]
    server.said("the ", max_tokens=3)
    slots = server.http.get("/slots").json()
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3]
    assert any(slot["n_past"] for slot in slots)
    with server.endless():
        server.until(lambda: any(s["is_processing"] for s in server.http.get("/slots").json()))
    server.until_let_go()


def test_the_log_and_the_counts_are_of_the_same_requests(serve):
    lines = []
    with serve(adapters={}, log=lines.append) as server:
        server.said("the ", max_tokens=3)
        server.chat(max_tokens=2, stream=True)
        assert server.text(n=0).status_code == 400
        assert server.http.get("/v1/secret").status_code == 404
        embedded = server.http.post("/v1/embeddings", json={"input": ["the", "a"]}).json()
        server.until(lambda: len(lines) == 5)  # a line comes when its answer has gone
        metrics = server.http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [json.loads(line) for line in lines[:5]]
    counts = dict(re.findall(r"^pyggml_(\S+) (\S+)$", metrics.text, re.MULTILINE))
    assert [line["status"] for line in lines] == [200, 200, 400, 404, 200]
    assert lines[4]["prompt_tokens"] == embedded["usage"]["prompt_tokens"] > 0
    assert lines[0]["answer_tokens"] == 3 and lines[0]["finish"] == ["length"]
    assert lines[0]["seconds"] >= lines[0]["first_token"] > 0
    assert lines[3]["path"] == "other" and "secret" not in metrics.text
    for name in ("prompt_tokens", "answer_tokens"):
        assert int(counts[f"{name}_total"]) == sum(line.get(name, 0) for line in lines)
    assert counts['requests_total{path="/v1/completions",status="400"}'] == "1"
    assert counts["answers_active"] == "0" and counts["slots"] == "4"


def test_strangers_learn_nothing(serve):
    with serve(access=Access(keys=("secret",))) as server:
        for path in KEYED:
            assert server.http.get(path).status_code == 401
        answer = server.http.get("/metrics", headers={"authorization": "Bearer secret"})
        assert answer.status_code == 200


def test_keys_of_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\nfirst\n\n second \n")
    assert keys_of(path) == ("first", "second")
    path.write_text("#\n")
    for wrong in (path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="api_key_file"):
            keys_of(wrong)
