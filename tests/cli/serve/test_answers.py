"""Answers are those of `pyggml generate`: one or many at once, whole or streamed, cached or not."""

import json
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

import pyggml
from pyggml.cli.terminal.show import printable
from pyggml.generation import Batch, Sampling, complete, generate
from pyggml.kernels.attention.row_softmax import SCALES
from pyggml.kernels.gemm import CHOSEN

ROOT = Path(__file__).parents[3]
GREEDY = {"temperature": 0, "max_tokens": 24}
PROMPT = "the path to the other thing\n"
# Tiles (AMX) and pairs of bfloat16 round a long pass, not a short one.
ROUNDED = 0.035 if CHOSEN.tiles or SCALES else 0.02


def events(answer):
    """The objects of a stream, without its end."""
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines[:-1]]


def generated(model, prompt, n_tokens=24, **how):
    ids = model.tokenizer.encode(prompt, parse_special=True)
    pieces = complete(model, ids, n_tokens, Sampling(**{"temperature": 0, **how}))
    return "".join(piece.text for piece in pieces)


def test_each_model_by_its_name(server, chatty, adapters, pyggml):
    """What the command line writes with that adapter, all three asked at the same time."""
    with ThreadPoolExecutor(3) as pool:
        names = ("tiny", "red", "blue")
        texts = list(pool.map(lambda name: server.said(PROMPT, model=name, **GREEDY), names))
    assert len(set(texts)) == 3
    for name, text in zip(names, texts, strict=True):
        lora = ("--lora", adapters[name]) if name in adapters else ()
        escaped = PROMPT.replace("\n", "\\n")
        command = ("generate", "-m", chatty, *lora, "-p", escaped, "-n", 24, "--temp", 0)
        assert pyggml(*command).out == PROMPT + printable(text) + "\n"


def test_models_are_found_by_any_name(serve, adapters):
    names = ("a/b", "a/b/c", "/a", "a/", "a b", "ü", "a?b#c", "a%2Fb", "v1/models")
    with serve(adapters=dict.fromkeys(names, adapters["red"])) as server:
        for name in names:
            answer = server.http.get(f"/v1/models/{quote(name, safe='')}")
            assert answer.json().get("id") == name, (name, answer.url, answer.text)
        assert server.http.get("/v1/models/a/b").json()["id"] == "a/b"


def test_a_developer_says_what_a_system_says(server):
    """OpenAI's newer name of the role, which this template does not know."""
    user = {"role": "user", "content": "a"}
    said = [
        server.http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": role, "content": "Be brief."}, user], **GREEDY},
        ).json()
        for role in ("system", "developer")
    ]
    texts = [answer["choices"][0]["message"] for answer in said]
    assert texts[0] == texts[1]
    assert said[0]["usage"]["prompt_tokens"] == said[1]["usage"]["prompt_tokens"]


def test_a_chat_is_asked_as_its_template_says(server, chatty):
    said = server.chat("hello", **GREEDY).json()
    assert said["object"] == "chat.completion" and said["model"] == "tiny"
    (choice,) = said["choices"]
    assert choice["message"]["role"] == "assistant"
    model = pyggml.load(chatty)
    assert choice["message"]["content"] == generated(model, "user: hello\nassistant:")
    n_prompt = len(model.tokenizer.encode("user: hello\nassistant:"))
    assert said["usage"]["prompt_tokens"] == n_prompt
    assert said["usage"]["completion_tokens"] == 24 and choice["finish_reason"] == "length"


def test_tools_are_told_to_the_model(server):
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    plain, told, none = (
        server.chat(max_tokens=1, **given).json()["usage"]["prompt_tokens"]
        for given in ({}, {"tools": [tool]}, {"tools": [tool], "tool_choice": "none"})
    )
    assert told > plain == none


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_says_the_same(server, n):
    given = {"seed": 7, "n": n, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    whole = server.chat(**given).json()
    parts = events(server.chat(stream=True, stream_options={"include_usage": True}, **given))
    assert parts[-1]["choices"] == []
    assert {**parts[-1]["usage"], "prompt_tokens_details": None} == {
        **whole["usage"],
        "prompt_tokens_details": None,
    }
    for i, choice in enumerate(whole["choices"]):
        mine = [c for part in parts for c in part["choices"] if c["index"] == i]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        told = [t for c in mine if c["logprobs"] for t in c["logprobs"]["content"]]
        tokens, numbers = parted(told)
        wanted, wanted_numbers = parted(choice["logprobs"]["content"])
        assert tokens == wanted
        assert numbers == pytest.approx(wanted_numbers, abs=1e-3)
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
    assert len({choice["message"]["content"] for choice in whole["choices"]}) == n


def parted(told):
    """The tokens, and their log-probabilities. The last digits of these depend on which tokens were
    cached and which shared a pass: another path may serve, which adds in another order."""
    every = [t for token in told for t in (token, *token["top_logprobs"])]
    return [(t["token"], t["bytes"]) for t in every], [t["logprob"] for t in every]


def test_the_same_seed_gives_the_same_text(server):
    given = {"temperature": 1.5, "max_tokens": 20}
    one, same, other = (server.said(seed=seed, **given) for seed in (5, 5, 6))
    assert one == same != other


def test_several_prompts_and_token_ids(server, chatty):
    model = pyggml.load(chatty)
    ids = model.tokenizer.encode("other")
    texts = [c["text"] for c in server.text(["the ", "other"], **GREEDY).json()["choices"]]
    assert texts == [generated(model, "the "), generated(model, "other")]
    assert server.said(ids, **GREEDY) == server.said([ids], **GREEDY) == texts[1]
    echoed = server.said("other", echo=True, **GREEDY)
    assert echoed == "other" + texts[1]
    streamed = events(server.text("other", echo=True, stream=True, **GREEDY))
    assert "".join(part["choices"][0]["text"] for part in streamed) == echoed


def predicted(model, ids):
    """log p of each token but the first after those before it, and which is the likeliest."""
    z = model.logits(ids)[:-1].astype(np.float64)
    z -= z.max(1, keepdims=True)
    p = z - np.log(np.exp(z).sum(1, keepdims=True))
    return p[np.arange(len(p)), ids[1:]], p


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echo_tells_what_was_predicted_of_the_prompt(server, chatty, max_tokens):
    """Also of a prompt that is in the cache, beside others, and longer than a pass reads."""
    model = pyggml.load(chatty)
    long = "the path to the other thing " * 12
    prompts = [model.tokenizer.encode(text) for text in ("the ", long, long)]
    params = {"echo": True, "logprobs": 3, "max_tokens": max_tokens, "seed": 1}
    said = server.text(prompts, **params).json()
    assert said["usage"]["completion_tokens"] == 3 * max_tokens
    streamed = events(server.text(prompts, stream=True, **params))
    for i, (ids, choice) in enumerate(zip(prompts, said["choices"], strict=True)):
        told = choice["logprobs"]
        n = len(ids)
        assert len(told["tokens"]) == n + max_tokens and choice["finish_reason"] == "length"
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        wanted, every = predicted(model, ids)
        np.testing.assert_allclose(told["token_logprobs"][1:n], wanted, atol=ROUNDED)
        for likeliest, row in zip(told["top_logprobs"][1:n], every, strict=True):
            best = max(likeliest.values())
            np.testing.assert_allclose(best, row.max(), atol=ROUNDED)
        assert choice["text"].startswith(model.tokenizer.decode(ids))
        for token, at in zip(told["tokens"], told["text_offset"], strict=True):
            assert choice["text"][at:].startswith(token) or not at
        parts = [c for part in streamed for c in part["choices"] if c["index"] == i]
        assert "".join(part["text"] for part in parts) == choice["text"]
        found = [p for part in parts for p in (part["logprobs"] or told | {"tokens": []})["tokens"]]
        assert found == told["tokens"] and parts[-1]["finish_reason"] == "length"


def test_a_stop_string_across_tokens_ends_the_answer(server):
    text = server.said(**GREEDY)
    stop = text[9:14]
    cut = text[: text.index(stop)]
    answer = server.text(stop=[stop, "never said"], **GREEDY).json()["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == (cut, "stop")
    parts = events(server.text(stop=stop, stream=True, **GREEDY))
    assert "".join(part["choices"][0]["text"] for part in parts) == cut


def test_log_probabilities_are_the_models(server, chatty):
    answer = server.text("the ", logprobs=3, max_tokens=4, temperature=0).json()["choices"][0]
    model = pyggml.load(chatty)
    prompt = model.tokenizer.encode("the ")
    ids = [*prompt, *generate(model, prompt, 4)]
    z = model.logits(ids[:-1])[-4:].astype(np.float64)
    wanted = z - np.log(np.exp(z).sum(1, keepdims=True))
    told = answer["logprobs"]
    np.testing.assert_allclose(told["token_logprobs"], wanted.max(1), atol=0.02)
    assert [max(top, key=top.get) for top in told["top_logprobs"]] == told["tokens"]
    assert told["tokens"] == [model.tokenizer.decode([id]) for id in ids[-4:]]
    assert told["text_offset"] == [0, *np.cumsum([len(t) for t in told["tokens"]])[:-1]]


def test_a_bias_of_minus_100_bans_a_token(server, chatty):
    token = pyggml.load(chatty).tokenizer.encode(server.said(**GREEDY)[0])[0]
    banned = server.text(logit_bias={str(token): -100}, logprobs=0, **GREEDY).json()["choices"][0]
    assert banned["text"] != server.said(**GREEDY)
    assert chr(token) not in banned["logprobs"]["tokens"]


def test_a_cached_prefix_changes_no_text(serve):
    with serve() as server:
        first = server.text(PROMPT * 6, **GREEDY).json()
        again = server.text(PROMPT * 6, **GREEDY).json()
        longer = server.text(PROMPT * 7, **GREEDY).json()
    n = first["usage"]["prompt_tokens"]
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, again, longer)]
    assert cached == [0, n - 1, n]
    assert first["choices"] == again["choices"]
    with serve() as fresh:
        assert fresh.said(PROMPT * 7, **GREEDY) == longer["choices"][0]["text"]


def test_what_many_ask_about_is_read_once(serve, monkeypatch):
    fed = []

    def feed(batch, pieces, every=()):
        fed.extend(len(ids) for ids in pieces.values())
        return whole(batch, pieces, every)

    whole = Batch.feed
    monkeypatch.setattr(Batch, "feed", feed)
    with serve() as server:
        usage = server.text(PROMPT * 8, n=4, max_tokens=4, temperature=0).json()["usage"]
    assert usage["completion_tokens"] == 16
    # The prompt once; for three of four its last token; and what each wrote, but the last token.
    assert sum(fed) == usage["prompt_tokens"] + 3 + 4 * 3


def test_a_predicted_text_changes_no_answer(server):
    said = server.chat(**GREEDY).json()["choices"][0]["message"]["content"]
    parts = [{"type": "text", "text": said[:3]}, {"type": "text", "text": said[3:]}]
    for content in (said, parts, "else", ""):
        told = server.chat(**GREEDY, prediction={"type": "content", "content": content}).json()
        assert told["choices"][0]["message"]["content"] == said
    for wrong in ("a", {"type": "content"}, {"content": "a"}, {"type": "content", "content": [1]}):
        answer = server.chat(prediction=wrong)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "prediction"


def test_the_context_ends_an_answer(serve):
    with serve(ctx=64) as server:
        answer = server.text("a" * 50).json()
    assert answer["usage"]["total_tokens"] == 64
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_text_that_ends_a_turn_ends_an_answer(serve):
    """As of a model whose vocabulary has no token for it."""
    with serve() as server:
        said = server.chat(**GREEDY).json()["choices"][0]["message"]["content"]
        voice = server.service.voices["tiny"]
        voice.chats = replace(voice.chats, ending=said[5:8])
        choice = server.chat(**GREEDY).json()["choices"][0]
        assert choice["message"]["content"] == said[: said.index(said[5:8])]
        assert choice["finish_reason"] == "stop"
        assert server.said(**GREEDY) == server.said(stop=[], **GREEDY), "texts have no turns"


def test_the_page_on_serving_shows_python_that_runs(chatty, tmp_path, monkeypatch, capsys):
    (block,) = re.findall(
        r"```python\n(from queue.*?)```", (ROOT / "docs/serving.md").read_text(), re.S
    )
    shutil.copy(chatty, tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    assert capsys.readouterr().out


def test_models_are_listed(server):
    listed = server.http.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["tiny", "red", "blue"]
    assert server.http.get("/v1/models/red").json() == listed["data"][1]
    assert all(0 <= time.time() - model["created"] < 86_400 for model in listed["data"])
    assert server.http.get("/health").json()["status"] == "ok"
