"""Answers that are held to calls of tools: whatever a model prefers, they can be read and fit."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyggml.chat.tools import SYNTAXES, AnswerReader, ToolChoice, find_thought, grammar_of
from pyggml.generation import Sampling
from pyggml.generation.form import follower
from pyggml.tokenizer import from_metadata
from pyggml.tokenizer.bpe import BYTE_OF

SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"], "type": "string"},
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "at": {"$ref": "#/$defs/place"},
        "on": {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
            "required": ["x"],
        }
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "strict": True}},
]
CONTROL = ("<s>", "</s>", "[TOOL_CALLS]", "<|START_ACTION|>", "<|call|>", "<|tool_call_start|>")
THINK = find_thought("<think>")
# After a call of gpt-oss its answer ends.
JSON_LISTS = [s for s in SYNTAXES if s.notation is None and s.family != "gpt-oss"]


def vocabulary(control):
    """A tokenizer of bytes and control tokens."""
    tokens = [*control, *BYTE_OF]
    types = [3] * len(control) + [1] * len(BYTE_OF)
    return from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array(types, np.int32),
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": 1,
        }
    )


VOCABULARIES = [vocabulary(CONTROL[:2]), vocabulary(CONTROL)]
# Of what may come, a model that likes ends: a text of any length would go on for long.
LIKED = np.array([40.0 if chr(i) in '"}])>\n,:_' else 1.0 for i in range(256)])


def written(tokenizer, grammar, seed, most=1500):
    """An answer of a model without preferences, and whether its form is complete."""
    rng, ids = np.random.default_rng(seed), list[int]()
    weights = np.ones(tokenizer.n_vocab)
    for id in range(tokenizer.n_vocab):
        raw = tokenizer.token_bytes(id, special=True)
        weights[id] = LIKED[raw[0]] if len(raw) == 1 else 90.0
    form = follower(Sampling(grammar=grammar), tokenizer, [])
    while not form.is_complete and len(ids) < most:
        allowed = weights * form.mask(tokenizer.n_vocab)
        id = int(rng.choice(len(allowed), p=allowed / allowed.sum()))
        if tokenizer.is_eog(id):
            return tokenizer.decode(ids, special=True), True
        ids.append(id)
        form.accept([id])
        form.prepare()
    return tokenizer.decode(ids, special=True), form.is_complete


def ids_of(tokenizer):
    return {
        n: tokenizer.encode(n, add_special=False, parse_special=True)[0]
        for n in tokenizer.control_names()
    }


def calls_of(syntax, text, thought=None):
    calls = []
    reader = AnswerReader(syntax, TOOLS, thought)
    for said in [*reader.feed(text), *reader.finish()]:
        assert not said.content, text
        if said.call is not None:
            calls += [[said.name, ""]] if said.name else []
            calls[-1][1] += said.arguments
    return calls


def fits(value):
    """Whether arguments fit SCHEMA."""
    kinds = {"city": str, "days": int, "at": dict, "on": list, "unit": str}
    x = value.get("at", {"x": 0})["x"]
    return (
        {"city", "unit"} <= value.keys() <= kinds.keys()
        and all(type(value[name]) is kinds[name] for name in value)
        and value["unit"] in ("C", "F")
        and type(x) in (int, float)
        and all(item in (True, False, None) for item in value.get("on", []))
    )


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.family.split(",")[0])
@pytest.mark.parametrize("several", [False, True])
def test_a_required_call_is_one(syntax, several):
    """Its name is a tool's, its arguments fit the schema."""
    n_complete = 0
    for seed in range(4):
        tokenizer = VOCABULARIES[seed % 2]
        choice = ToolChoice(tools=TOOLS, needs=True, several=several)
        thought = THINK if seed > 1 else None
        text, complete = written(
            tokenizer, grammar_of(syntax, choice, ids_of(tokenizer), thought), seed
        )
        if not complete:
            continue
        n_complete += 1
        calls = calls_of(syntax, text, thought)
        assert calls and (several or len(calls) == 1), text
        for name, arguments in calls:
            assert name in ("get_weather", "now"), text
            if name == "get_weather":
                assert fits(json.loads(arguments)), text
    assert n_complete


@pytest.mark.parametrize("syntax", JSON_LISTS, ids=lambda s: s.family)
def test_a_required_answer_holds_several_calls_where_it_may(syntax):
    tokenizer = VOCABULARIES[1]
    call = syntax.before + "now" + syntax.middle.replace("#", "0") + "{}"
    if syntax.keys:
        name, arguments = syntax.keys
        call = f'{syntax.before}{{\n        "{name}": "now", "{arguments}": {{}}\n    }}'
    calls = [call + syntax.after] * 3
    text = syntax.opening + syntax.between.join(calls) + syntax.closing
    assert calls_of(syntax, text) == [["now", "{}"]] * 3
    tokens = tokenizer.encode(text, add_special=False, parse_special=True)
    for several in (True, False):
        choice = ToolChoice(tools=TOOLS, needs=True, several=several)
        how = Sampling(grammar=grammar_of(syntax, choice, ids_of(tokenizer), None))
        n = follower(how, tokenizer, []).n_fitting(tokens)
        fitting = tokenizer.decode(tokens[:n], special=True)
        assert fitting.count("now") == (3 if several else 1)
        assert (n == len(tokens)) == several


@given(seed=st.integers(0, 1 << 30))
def test_beside_a_schema_an_answer_is_a_call_or_fits_it(seed):
    choice = ToolChoice(tools=TOOLS, needs=False, several=False, schema={"enum": ["yes", "no"]})
    text, complete = written(VOCABULARIES[0], grammar_of(SYNTAXES[0], choice, {}, None), seed)
    if complete:
        assert text.strip() in ('"yes"', '"no"') or calls_of(SYNTAXES[0], text)


@pytest.mark.parametrize("family", ["Hermes", "Llama", "Mistral 7B"])
def test_beside_text_a_call_is_held_from_its_mark_on(family):
    syntax = next(s for s in SYNTAXES if s.family.startswith(family))
    tokenizer = VOCABULARIES[1]
    ids = ids_of(tokenizer)
    choice = ToolChoice(tools=TOOLS, needs=False, several=False)
    how = Sampling(grammar=grammar_of(syntax, choice, ids, None))
    begun = {
        "Hermes": 'So <b>: <tool_call>\n{"name": "',
        "Llama": '{"name": "',
        "Mistral 7B": 'So: [TOOL_CALLS][{"name": "',
    }[family]
    form = follower(how, tokenizer, [])
    tokens = tokenizer.encode(begun, add_special=False, parse_special=True)
    for token in tokens:
        assert form.mask(tokenizer.n_vocab)[token], tokenizer.token_bytes(token)
        form.accept([token])
    allowed = np.flatnonzero(form.mask(tokenizer.n_vocab))
    assert {tokenizer.token_bytes(int(id)) for id in allowed} == {b"g", b"n"}
