"""Answers in a form: whatever the logits, they are in it; what is none is refused in a sentence."""

import json
import re
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pyggml
from pyggml import tokenizer
from pyggml.errors import ConfigError
from pyggml.generation import Batch, Completion, Finish, Sampling, complete
from pyggml.generation.form import MOST_FORCED, Follower, follower
from pyggml.generation.serving import Request, Scheduler
from pyggml.tokenizer.tokenizer import from_metadata

DEMO = Path(pyggml.__file__).parents[1] / "cli/demo/base.gguf"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": ["boolean", "null"]},
                "next": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        },
        "leaf": {"const": "a leaf that is told in many words, all of which are known"},
    },
    "$ref": "#/$defs/node",
}


def is_person(value):
    assert value.keys() == {"name", "age", "tags"} and 1 <= len(value["name"]) <= 12
    assert type(value["age"]) is int and 0 <= value["age"] <= 130
    assert len(value["tags"]) <= 3 and {*value["tags"]} <= {"a", "b"}


def is_tree(value):
    assert value.keys() == {"value", "next"} and value["value"] in (True, False, None)
    assert value["next"] in (None, TREE["$defs"]["leaf"]["const"])


CASES = {
    "person": ({"json_schema": json.dumps(PERSON)}, lambda text: is_person(json.loads(text))),
    "tree": ({"json_schema": json.dumps(TREE)}, lambda text: is_tree(json.loads(text))),
    "choice": (
        {"json_schema": json.dumps({"enum": ["yes", "no", 7, None]})},
        lambda text: json.loads(text) in ("yes", "no", 7, None) or pytest.fail(text),
    ),
    "regex": (
        {"regex": r"([0-9]{1,3}\.){3}[0-9]{1,3} (up|down)"},
        lambda text: (
            re.fullmatch(r"([0-9]{1,3}\.){3}[0-9]{1,3} (up|down)", text) or pytest.fail(text)
        ),
    ),
    "gbnf": (
        {"grammar": 'root ::= "caf\\u00e9: " move ("," move){2}\nmove ::= [a-h] [1-8] # a square'},
        lambda text: (
            re.fullmatch("café: [a-h][1-8],[a-h][1-8],[a-h][1-8]", text) or pytest.fail(text)
        ),
    ),
    "lark": (
        {"grammar": 'start: "<" WORD "/"? ">"\nWORD: /[a-z]{2,9}/'},
        lambda text: re.fullmatch(r"<[a-z]{2,9}/?>", text) or pytest.fail(text),
    ),
}


def with_spaces():
    """A vocabulary that puts a space before texts."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", *map(chr, range(33, 127)), "▁yes", '":', "up", "é", "▁{"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)]
    values = {
        "model": "llama",
        "tokens": pieces,
        "scores": -np.arange(len(pieces), dtype=np.float32),
        "token_type": np.array(kinds, np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return from_metadata({f"tokenizer.ggml.{name}": value for name, value in values.items()})


@pytest.fixture(params=["gpt2", "llama"])
def words(request):
    return tokenizer.from_gguf(DEMO) if request.param == "gpt2" else with_spaces()


def written(words, how, seed, prompt=(), most=4000, n_beyond=3):
    """The text that random logits give, and why it ended. n_beyond: logits without a token."""
    rng = np.random.default_rng(seed)
    completion, text = Completion(words, how, prompt, most), ""
    while completion.finish is None:
        logits = rng.normal(0, 4, words.n_vocab + n_beyond).astype(np.float32)
        for piece in [completion.take(logits), *completion.forced_pieces(most)]:
            assert text is not None and piece.token < words.n_vocab
            text += piece.text
    return text, completion


@pytest.mark.parametrize("case", CASES)
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 1 << 30), temperature=st.sampled_from([0.0, 0.7, 2.0]))
def test_whatever_the_logits_the_answer_is_in_its_form(case, words, seed, temperature):
    form, check = CASES[case]
    how = Sampling(temperature=temperature, seed=seed, **form)
    text, completion = written(words, how, seed)
    assert completion.finish in (Finish.FORM, Finish.STOP_TOKEN), text[-200:]
    assert completion.finish.reason == "stop"
    check(text)


def test_tokens_without_a_choice_are_not_sampled():
    """The words of a constant come together, at most MOST_FORCED, and spell it."""
    words = tokenizer.from_gguf(DEMO)
    said = "what everybody knows is told here once more, " * 6
    how = Sampling(regex=re.escape(said) + "[ab]", temperature=0)
    completion = Completion(words, how)
    logits = np.zeros(words.n_vocab, np.float32)
    counts = []
    while completion.finish is None:
        pieces = [completion.take(logits), *completion.forced_pieces(MOST_FORCED + 5)]
        counts.append(len(pieces))
    assert max(counts) > 20 and len(counts) < len(completion.tokens) / 4, counts
    assert words.decode(completion.tokens)[:-1] == said
    assert not [*Completion(words, how).forced_pieces(0)], "no room"
    told = Completion(words, Sampling(regex="abc", logprobs=1))
    assert told.take(logits).logprob is not None and not [*told.forced_pieces(10)], (
        "all are told of"
    )


def test_a_long_constant_takes_time_by_its_length(words):
    """Also of tokens that put a space before a text: each place looks no further than a token."""
    start = time.process_time()
    place = follower(Sampling(json_schema=json.dumps({"const": "x" * 20_000})), words, ())
    assert place.mask(words.n_vocab).any()
    assert time.process_time() - start < 10  # a minute and more, where each looked to the end


def test_any_character_of_gbnf_may_be_a_new_line():
    """As in llama.cpp; a point in a text or a class is one."""
    words = tokenizer.from_gguf(DEMO)
    for grammar, text, fits in (
        ('root ::= "a" . .* "/./"', "a\n\n\r/./", True),
        ('root ::= [/./]{3} "." # .', "/./.", True),
        ('root ::= "/./" [x.]', "/a/", False),
        ('root ::= "/./" [x./]', "/./\n", False),
    ):
        tokens = words.encode(text, add_special=False)
        place = follower(Sampling(grammar=grammar), words, ())
        assert (place.n_fitting(tokens) == len(tokens)) == fits, (grammar, text)


def test_a_mask_is_that_of_the_place():
    words = tokenizer.from_gguf(DEMO)
    place = follower(Sampling(regex="(yes|no)"), words, ())
    (first,) = {words.token_bytes(i)[:1] for i in np.flatnonzero(place.mask(2000))} - {b"n"}
    assert first == b"y" and place.mask(2000).shape == (2000,) and not place.is_complete
    place.accept(words.encode("no", add_special=False))
    assert place.is_complete


@pytest.mark.parametrize("name", ["think", "reasoning"])
def test_a_thought_that_the_prompt_opens_is_free(name):
    words = tokenizer.from_gguf(DEMO)
    prompt = words.encode(f"Well: <{name}>\n", add_special=False)
    place = follower(Sampling(regex="[0-9]"), words, prompt)
    assert place.mask(words.n_vocab) is None and not place.forced_tokens(5)
    place.accept(words.encode(f"so be it</{name}>", add_special=False))
    may_come = np.flatnonzero(place.mask(words.n_vocab))
    assert {words.token_bytes(i) for i in may_come} == {b"%d" % i for i in range(10)}
    assert follower(Sampling(regex="[0-9]"), words, prompt[:-3]).mask(9) is not None


def test_a_vocabulary_without_an_end_may_be_held(words):
    words._ends = frozenset()
    text, completion = written(words, Sampling(regex="[ab]{3}", seed=1), 1)
    assert completion.finish is Finish.FORM and re.fullmatch("[ab]{3}", text)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_many_answers_of_a_batch_keep_to_their_forms(temperature):
    """And each is the same as alone, by `complete`."""
    model = pyggml.load(DEMO, compute="f32")
    hows = [Sampling(temperature=temperature, seed=3, **form) for form, _ in CASES.values()]
    hows.append(Sampling(temperature=temperature, seed=3))
    prompt = np.array(model.tokenizer.encode("Once ", add_special=False), np.int32)
    alone = [[*complete(model, prompt, 60, how)] for how in hows]
    scheduler, told = Scheduler(Batch(model, len(hows), 128, deterministic=True)), {}
    for i, how in enumerate(hows):
        completion, told[i] = Completion(model.tokenizer, how, prompt, 60, 128), []
        scheduler.submit(
            Request(prompt=prompt, completion=completion, model=model, tell=told[i].append)
        )
    while scheduler.step():
        pass
    for i, pieces in enumerate(alone):
        assert [p.token for p in told[i]] == [p.token for p in pieces], hows[i]


def test_an_answer_in_a_form_goes_through_a_full_context():
    model = pyggml.load(DEMO, compute="f32")
    how = Sampling(regex="(one two three four five, ){20}", temperature=0)
    prompt = model.tokenizer.encode("Count: ", add_special=False)
    pieces = [*islice(complete(model, prompt, 400, how, n_ctx=48, n_keep=4), 400)]
    assert "".join(p.text for p in pieces) == "one two three four five, " * 20
    assert pieces[-1].finish is Finish.FORM


@pytest.mark.parametrize(
    "form, said",
    [
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "[1]"}, "is no object, wanted a JSON schema"),
        ({"json_schema": "[" * 60_000}, "nested too deeply"),
        ({"json_schema": '{"$ref": "https://elsewhere/a.json"}'}, "json_schema"),
        ({"regex": "(a"}, "regex"),
        ({"regex": "(?=a)b"}, "regex"),
        ({"grammar": 'root ::= "a" other'}, "other"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"grammar": 'root ::= "a" !<think>'}, "has !<think>, wanted characters"),
        ({"grammar": "root ::= " + "(" * 30_000}, "grammar"),
        ({"grammar": "start: nothing"}, "grammar"),
        ({"regex": "a", "grammar": 'root ::= "a"'}, "is given beside regex"),
        ({"regex": ""}, "wanted a text of 1 to"),
        ({"regex": "a" * 70_000}, "wanted a text of 1 to"),
    ],
)
def test_what_is_no_form_is_refused_in_a_line(form, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        follower(Sampling(**form), tokenizer.from_gguf(DEMO), ())
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_form_that_grows_too_large_ends_its_answer():
    """llguidance has limits of its own, and then makes no mask any more."""

    class Exhausted:
        compute_bitmask = staticmethod(lambda: b"")
        is_error = staticmethod(lambda: True)
        get_error = staticmethod(lambda: "too many states:\n  ^^^\n  20001")

    place = Follower(Exhausted(), tokenizer.from_gguf(DEMO), forces=False)
    with pytest.raises(ConfigError, match="form cannot be followed: too many states: 20001"):
        place.mask(10)


def test_a_form_that_nothing_fits_says_so():
    words = tokenizer.from_gguf(DEMO)
    with pytest.raises(ConfigError) as caught:
        place = follower(Sampling(json_schema='{"$ref": "#"}'), words, ())
        place.mask(words.n_vocab)
    assert str(caught.value) == "the answer's form cannot be followed: no token fits here"
    assert caught.value.message(lambda name: f"--{name}") == str(caught.value), "no option"


def test_a_form_that_no_biased_token_fits_says_so():
    words = tokenizer.from_gguf(DEMO)
    (token,) = words.encode("a", add_special=False)
    completion = Completion(words, Sampling(regex="a", logit_bias={token: -np.inf}))
    with pytest.raises(ConfigError, match="forbids every token .* that the answer's form has here"):
        completion.take(np.zeros(words.n_vocab, np.float32))


def test_without_llguidance_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"regex needs llguidance: pip install .*\[forms\]"):
        follower(Sampling(regex="a"), tokenizer.from_gguf(DEMO), ())
