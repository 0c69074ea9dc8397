"""`generate` and `chat` hold answers to forms: of a model of random weights, at temperature 2."""

import io
import json
import re

import pytest

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 7, "maximum": 9}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
FORMS = {
    "json-schema": json.dumps(SCHEMA),
    "regex": "[a-f]{3}(-[0-9]+)+!",
    "grammar": 'root ::= "so " move+ "."\nmove ::= [a-h] [1-8]',
    "lark": 'start: "<" WORD "/"? ">"\nWORD: /[a-z]{2,9}/',
}
PATTERNS = {
    "regex": FORMS["regex"],
    "grammar": r"so ([a-h][1-8])+\.",
    "lark": "<[a-z]{2,9}/?>",
}


def follows(form, text):
    if form in PATTERNS:
        return re.fullmatch(PATTERNS[form], text)
    value = json.loads(text)
    return value.keys() == {"ok", "n"} and type(value["ok"]) is bool and value["n"] in (7, 8, 9)


@pytest.fixture(scope="module")
def talker(model_with):
    template = "{% for m in messages %}<|endoftext|>{{ m.content }}{% endfor %}<|endoftext|>"
    return model_with(tokenizer__chat_template=template, llama__context_length=1024)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_answer_is_in_its_form(command, form, talker, pyggml, monkeypatch):
    pytest.importorskip("llguidance")
    option = "grammar" if form == "lark" else form
    given = (f"--{option}", FORMS[form], "--temp", 2, "--top-k", 0, "--top-p", 1, "-n", 600)
    if command == "chat":
        monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n"))
        ended = pyggml("chat", "-m", talker, *given, "--seed", 1)
        text = ended.out.strip()
    else:
        ended = pyggml("generate", "-m", talker, "-p", "the ", *given, "--seed", 1, "--json")
        text = json.loads(ended.out)["text"]
    assert ended.code == 0 and follows(form, text), ended
