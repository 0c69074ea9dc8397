"""What a client may not: each fault is an error object with its status, and names the field."""

import asyncio
import json
import math
import socket
from pathlib import Path

import pytest
from starlette.requests import Request

from pyggml.cli.commands.serve import reference
from pyggml.cli.web.body import Bodies
from pyggml.cli.web.connections import Patience
from pyggml.cli.web.errors import ApiError
from pyggml.cli.web.guard import Access, name_of

ROOT = Path(__file__).parents[3]
SAID = [{"role": "user", "content": "a"}]
TEXTS = [
    ({}, "prompt", "prompt is missing"),
    ({"prompt": ""}, "prompt", "the prompt is empty"),
    ({"prompt": [[1, -1]]}, "prompt", "prompt 1 is a list, wanted a string or token ids"),
    ({"prompt": [999]}, None, "tokens: ids from 999 to 999, wanted 0 to 257"),
    ({"prompt": "a\ud800"}, "prompt", "prompt has half of a surrogate pair"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens", "is -1, wanted a whole number from 0"),
    ({"prompt": "a", "temperature": "hot"}, "temperature", "is 'hot', wanted 0 to 100"),
    ({"prompt": "a", "temperature": True}, "temperature", "is True"),
    ({"prompt": "a", "repeat_penalty": 1e-320}, "repeat_penalty", "wanted 0.01 to 100"),
    ({"prompt": "a", "top_p": 2}, "top_p", "is 2, wanted 0 to 1"),
    ({"prompt": "a", "stream": "yes"}, "stream", "is 'yes', wanted true or false"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop", "wanted at most 16 texts"),
    ({"prompt": "a", "stop": [1]}, "stop", "is 1, wanted a string"),
    ({"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias", "'999', which is no token"),
    ({"prompt": "a", "logit_bias": [1]}, "logit_bias", "is a list, wanted an object"),
    (
        {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(258)), -math.inf)},
        "logit_bias",
        "forbids all 258 tokens of the model",
    ),
    ({"prompt": "a", "n": 1000}, "n", "is 1000, wanted a whole number from 1 to"),
    ({"prompt": ["a"] * 30, "n": 5}, "prompt", "ask for 150 answers, wanted at most"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "text is not filled in"),
    ({"prompt": "a", "best_of": 3}, "best_of", "wanted as n"),
    (
        {"prompt": "a", "max_tokens": 0},
        "max_tokens",
        "is 0, wanted 1 or more, or echo and logprobs",
    ),
    ({"prompt": "a", "grammar": "root"}, "grammar", "cannot be followed"),
    ({"prompt": "a", "\ud800": 1}, "\\ud800", r"\ud800 is not supported"),
    ({"prompt": "a", "stream_options": {"x": 1}}, "stream_options", "wanted include_usage"),
]
TOOLS = [{"type": "function", "function": {"name": "a"}}]
OTHER = {"type": "function", "function": {"name": "b"}}
CHATS = [
    ({}, "messages", "messages is missing"),
    ({"messages": "hi"}, "messages", "is 'hi', wanted a list of messages"),
    ({"messages": []}, "messages", "messages is empty"),
    ({"messages": [{"content": "a"}]}, "messages", "has a message 1 without a role"),
    ({"messages": [{"role": "boss", "content": "a"}]}, "messages", "'boss', wanted one of"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages", "a number"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages",
        "'image_url', wanted text alone",
    ),
    ({"messages": SAID, "response_format": {"type": "xml"}}, "response_format", "json_schema"),
    ({"messages": SAID, "response_format": {"type": "json_schema"}}, "response_format", "object"),
    (
        {"messages": SAID, "response_format": {"type": "json_object"}, "regex": "a"},
        "response_format",
        "is given beside another form",
    ),
    ({"messages": SAID, "json_schema": {"type": "x"}}, "json_schema", "cannot be followed"),
    ({"messages": SAID, "regex": "("}, "regex", "cannot be followed"),
    ({"messages": SAID, "regex": "a", "grammar": "b"}, "grammar", "is given beside regex"),
    ({"messages": SAID, "tool_choice": "required"}, "tool_choice", "wanted tools beside it"),
    ({"messages": SAID, "tool_choice": "any"}, "tool_choice", "wanted auto, none, required"),
    ({"messages": SAID, "tools": TOOLS, "tool_choice": OTHER}, "tool_choice", "none of the tools"),
    ({"messages": SAID, "tools": TOOLS * 2}, "tools", "has 'a' twice"),
    ({"messages": SAID, "tools": TOOLS, "regex": "a"}, "tools", "cannot hold an answer beside"),
    ({"messages": SAID, "tools": [{}]}, "tools", "a function without"),
    ({"messages": SAID, "top_logprobs": 3}, "top_logprobs", "wanted logprobs true"),
    ({"messages": SAID, "functions": []}, "functions", "wanted tools, their newer name"),
    ({"messages": SAID, "store": True}, "store", "nothing is kept"),
]


def refused(answer, status=400):
    """The error object."""
    assert answer.status_code == status, answer.text
    (error,) = answer.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    return error


@pytest.mark.quick
@pytest.mark.parametrize(
    "path, body, param, message",
    [("completions", *row) for row in TEXTS] + [("chat/completions", *row) for row in CHATS],
)
def test_faults_are_named(server, path, body, param, message):
    sent = json.dumps(body).replace("-Infinity", "-1e999")  # as JSON can say it
    error = refused(server.http.post(f"/v1/{path}", content=sent))
    assert error["type"] == "invalid_request_error"
    assert (error["param"], message in error["message"]) == (param, True), error["message"]


def test_all_faults_are_told_at_once(server):
    given = {"temperature": -1, "n": 0, "min_p": 3, "foo": 1, "stream": 1}
    message = refused(server.text(**given))["message"]
    assert all(f"{name} is" in message for name in given)


def test_null_is_as_if_it_were_not_there(server):
    given = {"stop": None, "n": None, "logit_bias": None, "user": "me", "temperature": None}
    assert server.text(max_tokens=1, **given).status_code == 200


def test_unknown_models_and_paths(server):
    error = refused(server.text(model="gpt-9"), 404)
    assert error["code"] == "model_not_found" and error["param"] == "model"
    assert "'gpt-9', known are tiny, red, blue" in error["message"]
    assert refused(server.http.get("/v1/models/x"), 404)["code"] == "model_not_found"
    refused(server.http.get("/v1/files"), 404)
    refused(server.http.get("/v1/completions"), 405)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"nope", b'{"a":1,"a":2}', b'{"prompt":NaN}', b"\xff\xfe", b"[" * 200_000],
)
def test_what_is_no_json_object(server, body):
    assert "JSON" in refused(server.http.post("/v1/completions", content=body))["message"]


def test_a_prompt_that_leaves_no_room(serve):
    with serve(ctx=64, max_prompt=32) as server:
        for answer in (server.text("a" * 80), server.text("a" * 33), server.chat("a" * 80)):
            assert refused(answer)["code"] == "context_length_exceeded"
        assert server.text("a" * 32, max_tokens=1).status_code == 200


def test_a_body_too_large_is_not_read(serve):
    with serve(max_body=2048) as server:
        refused(server.text("a" * 3000), 413)
        chunks = (b"a" * 500 for _ in range(8))  # without a length
        refused(server.http.post("/v1/completions", content=chunks), 413)
        assert server.text("a", max_tokens=1).status_code == 200


def test_a_body_that_never_ends(serve):
    with serve() as server:
        server.service.bodies.patience = Patience(body=0.3)
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 9\r\n\r\n{{"
            slow.sendall(head.encode())
            assert slow.recv(4096).startswith(b"HTTP/1.1 408")


def test_keys(serve):
    with serve(access=Access(keys=("right", "other"))) as server:
        for given in ("", "wrong", "Right", "right right", "rightx"):
            headers = {"authorization": f"Bearer {given}"} if given else {}
            answer = server.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert refused(answer, 401)["code"] == "invalid_api_key"
        basic = server.http.get("/v1/models", headers={"authorization": "Basic right"})
        refused(basic, 401)
        for key in ("right", "other"):
            bearer = {"authorization": f"Bearer {key}"}
            assert server.http.get("/v1/models", headers=bearer).status_code == 200
        assert server.http.get("/health").json() == {"status": "ok"}
        known = server.http.get("/health", headers={"authorization": "Bearer other"})
        assert known.json() == {"status": "ok", "active": 0, "waiting": 0}
        assert server.http.get("/").status_code == 200


def test_no_answer_lets_a_browser_look_up_hosts(server):
    """Links in an answer would tell whoever runs their names what was said."""
    paths = [route.path.replace("{name:path}", "tiny") for route in server.app.routes]
    assert len(paths) > 10
    for path in (*paths, "/none"):
        for method in ("GET", "POST"):
            headers = server.http.request(method, path).headers
            assert headers["x-dns-prefetch-control"] == "off"
            assert headers["referrer-policy"] == "no-referrer"


def test_names_that_a_page_of_another_site_gives_to_this_machine(server):
    """DNS rebinding: the request comes to the loopback, but under the site's name."""
    for host in ("evil.example", "evil.example:80", "localhost.evil.example", "", "[::2]:80"):
        refused(server.http.get("/", headers={"host": host}), 403)
    for host in ("localhost", "localhost:8080", "127.0.0.1:1", "[::1]:8080", "LOCALHOST"):
        assert server.http.get("/health", headers={"host": host}).status_code == 200
    assert name_of("[::1]:80") == name_of("[::1]") == "::1"


def fault(*headers, access=None, method="GET", path="/api/model"):
    """The status of the refusal of a request with these headers, or None."""
    raw = [(name.encode(), value.encode()) for name, value in headers]
    scope = {"type": "http", "method": method, "path": path, "headers": raw}
    refusal = (access or Access()).fault(scope)
    return refusal and refusal.status


HERE = ("host", "127.0.0.1:80")


@pytest.mark.parametrize(
    "host",
    ["[::1]evil.com", "127.0.0.1:evil.com", "127.0.0.1:80:80", "[::1", "127.0.0.1:", "a@localhost"],
)
def test_a_host_that_only_begins_like_this_machine(host):
    assert fault(("host", host)) == 403 and fault(HERE) is None


def test_origins_are_whole_and_alone():
    for origin in ("ftp://127.0.0.1:80", "127.0.0.1:80", "://127.0.0.1:80", "http://127.0.0.1:81"):
        assert fault(HERE, ("origin", origin)) == 403, origin
    own = ("origin", "http://127.0.0.1:80")
    assert fault(HERE, own) is None
    assert fault(HERE, own, ("origin", "https://evil.com")) == 400
    assert fault(HERE, HERE, own) == 400


def test_browsers_say_that_another_site_asks():
    for site in ("cross-site", "same-site"):
        told = ("sec-fetch-site", site)
        assert fault(HERE, told) == 403
        link = (("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document"))
        assert fault(HERE, told, *link) == 403, "a link to what a page reads"
        assert fault(HERE, told, *link, path="/") is None
        assert fault(HERE, told, ("sec-fetch-dest", "iframe"), path="/") == 403
        allowed = Access(origins=("https://a.example",))
        assert fault(HERE, told, ("origin", "https://a.example"), access=allowed) is None
    for site in ("same-origin", "none"):
        assert fault(HERE, ("sec-fetch-site", site)) is None


@pytest.mark.parametrize("length", ["9" * 20, "9" * 18, "101"])
def test_a_body_that_says_it_is_too_large_is_not_awaited(length):
    async def receive():
        raise AssertionError("it was awaited")

    scope = {"type": "http", "method": "POST", "headers": [(b"content-length", length.encode())]}
    with pytest.raises(ApiError, match="more than 100 bytes") as caught:
        asyncio.run(Bodies(100, 1000).read(Request(scope, receive), dict))
    assert caught.value.status == 413


def test_pages_of_other_sites_call_only_if_they_may(server, serve):
    here = server.http.get("/v1/models", headers={"origin": server.url})
    assert here.status_code == 200
    refused(server.http.get("/v1/models", headers={"origin": "https://a.example"}), 403)
    refused(server.http.get("/v1/models", headers={"origin": "null"}), 403)
    with serve(access=Access(origins=("https://a.example",))) as open_:
        params = {"origin": "https://a.example", "access-control-request-method": "POST"}
        before = open_.http.options("/v1/completions", headers=params)
        assert before.headers["access-control-allow-origin"] == "https://a.example"
        refused(open_.http.get("/v1/models", headers={"origin": "https://b.example"}), 403)


def test_more_requests_than_may_wait(serve):
    with serve(parallel=1, queue=1) as server:
        server.slow_down()
        with server.endless(), server.endless():
            server.until(lambda: server.service.worker.n_waiting == 1)
            error = refused(server.text(), 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        server.until_let_go()
        assert server.text(max_tokens=1).status_code == 200


def test_time_is_limited(serve):
    with serve(parallel=1, timeout=2) as server:
        server.slow_down()
        answer = server.text().json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert 0 < answer["usage"]["completion_tokens"] < 100, "the context has room for 508"


def test_a_fault_of_the_program_ends_no_server(serve, monkeypatch, caplog):
    with serve() as server:
        feed = server.batch.feed
        monkeypatch.setattr(server.batch, "feed", lambda *given: 1 / 0)
        error = refused(server.text(), 500)
        assert error["type"] == "server_error" and "division" not in error["message"]
        assert "ZeroDivisionError" in caplog.text
        (event, *rest) = server.text(stream=True).text.split("\n\n")
        assert rest == [""], "a stream that fails has no [DONE]"
        assert json.loads(event.removeprefix("data: "))["error"] == error
        monkeypatch.setattr(server.batch, "feed", feed)
        assert server.text(max_tokens=1).status_code == 200
        idle = {"status": "ok", "active": 0, "waiting": 0}  # counted after the pass that answers
        server.until(lambda: server.http.get("/health").json() == idle)


@pytest.mark.quick
def test_every_field_of_the_reference_is_read_and_told(server):
    """The page has the table of the code, and no field is one that nobody knows."""
    page = (ROOT / "docs/serving.md").read_text("utf-8")
    assert reference.CHATS.table() in page and reference.RESPONSES.table() in page
    fields = {*reference.ANSWERED, *reference.REFUSED}
    said = refused(server.http.post("/v1/chat/completions", json={name: [{}] for name in fields}))
    assert "is not supported" not in said["message"]
    for name in (*reference.REFUSED, "tools", "n"):
        body = {"messages": SAID, name: [{}]}
        assert refused(server.http.post("/v1/chat/completions", json=body))["param"] == name
    ignored = {name: {} for name in reference.IGNORED}
    assert server.chat(max_tokens=1, **ignored).status_code == 200
