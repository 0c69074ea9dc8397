"""Answers in a form, as clients ask for them."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["ok", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


def content(answer):
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"]


def is_ours(text):
    value = json.loads(text)
    assert value.keys() == {"ok", "n"} and type(value["ok"]) is bool and 0 <= value["n"] <= 99


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
    ],
)
def test_an_answer_follows_its_schema(server, fields):
    is_ours(content(server.chat(temperature=2, max_tokens=150, **fields)))


def test_an_object_is_json(server):
    schema = {"type": "json_object"}
    answer = server.chat(response_format=schema, temperature=0, max_tokens=400, seed=1)
    (choice,) = answer.json()["choices"]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    else:
        assert choice["message"]["content"].startswith("{")


def test_a_stream_and_answers_beside_each_other_keep_to_their_forms(server):
    def ask(i):
        return server.said("the ", regex=f"({i}[ab]){{4}}!", temperature=2, seed=i, max_tokens=60)

    with ThreadPoolExecutor(6) as pool:
        texts = [*pool.map(ask, range(6))]
    assert all(re.fullmatch(f"({i}[ab]){{4}}!", text) for i, text in enumerate(texts)), texts
    fields = {"grammar": 'root ::= "so " ("yes" | "no")', "stream": True, "max_tokens": 60}
    with server.http.stream("POST", "/v1/completions", json={"prompt": "a", **fields}) as stream:
        lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
    parts = [json.loads(line)["choices"][0] for line in lines]
    assert "".join(part["text"] for part in parts) in ("so yes", "so no")
    assert parts[-1]["finish_reason"] == "stop"


def test_a_request_that_asks_for_text_has_no_form_of_the_server(server):
    from dataclasses import replace

    sampling = server.service.sampling
    server.service.sampling = replace(sampling, regex="[0-9]{3}")
    try:
        assert re.fullmatch("[0-9]{3}", content(server.chat(max_tokens=9)))
        other = content(server.chat(regex="x", max_tokens=9))
        free = server.chat(response_format={"type": "text"}, max_tokens=5, temperature=0)
    finally:
        server.service.sampling = sampling
    assert other == "x"
    said = free.json()["choices"][0]["message"]["content"]
    assert (
        said == server.chat(max_tokens=5, temperature=0).json()["choices"][0]["message"]["content"]
    )
