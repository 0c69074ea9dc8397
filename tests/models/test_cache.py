"""A key-value cache changes nothing: tokens fed in any portions give the logits of the whole."""

import numpy as np
import pytest

import pyggml
from pyggml.errors import DataError
from pyggml.generation import Session
from pyggml.models import ARCHITECTURES

SOME = ("llama", "mistral", "qwen2", "qwen3", "qwen3moe")
FILES = [(a, k) for a in SOME for k in ("F16", "Q8_0", "Q4_K_M")]
FILES += [("lfm2", "Q4_K_M"), ("mamba", "Q4_K_M")]
PORTIONS = [[1] * 20, [20], [13, 1, 1, 4, 1], [3, 7, 2, 8], [1, 19]]


def assert_same(found, wanted):
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_every_architecture_remembers(architecture, tiny):
    """Windows and layers without rotary positions included."""
    model = pyggml.load(tiny(architecture), compute="f32")
    tokens = np.arange(20) * 7 % 11
    whole = model.logits(tokens)
    for portions in PORTIONS[1:4]:
        session = Session(model, 24)
        for n in portions:
            logits = session.feed(tokens[session.n_past : session.n_past + n])
            assert_same(logits, whole[session.n_past - 1])


@pytest.mark.parametrize(("architecture", "kind"), FILES)
def test_portions_give_the_logits_of_the_whole(architecture, kind, golden_file, golden):
    model = pyggml.load(golden_file(f"{architecture}-{kind}.gguf"), compute="f32")
    tokens = golden(architecture)["tokens"][:20]
    whole = model.logits(tokens)
    for portions in PORTIONS:
        session = Session(model, 24)
        for n in portions:
            logits = session.feed(tokens[session.n_past : session.n_past + n])
            assert_same(logits, whole[session.n_past - 1])
        assert session.n_past == 20


def test_with_an_adapter(golden_file, golden):
    path, adapter = golden_file("qwen3-F16.gguf"), golden_file("qwen3-lora.gguf")
    model = pyggml.load(path, adapter, compute="f32")
    tokens = golden("qwen3")["tokens"][:20]
    session = Session(model, 20)
    session.feed(tokens[:15])
    assert_same(session.feed(tokens[15:]), model.logits(tokens)[-1])


def test_a_long_prompt_goes_in_by_chunks(tiny, monkeypatch):
    model = pyggml.load(tiny("qwen3"))
    tokens = np.arange(30) % 11
    monkeypatch.setattr("pyggml.generation.PROMPT_CHUNK", 8)
    session = Session(model, 30)
    assert_same(session.feed(tokens), model.logits(tokens)[-1])
    assert session.n_past == 30


def test_sessions_do_not_disturb_each_other(tiny):
    model = pyggml.load(tiny())
    tokens = np.arange(12) % 11
    whole, backwards = model.logits(tokens), model.logits(tokens[::-1])
    one, other = Session(model, 12), Session(model, 12)
    for i in range(0, 12, 4):
        found, reverse = one.feed(tokens[i : i + 4]), other.feed(tokens[::-1][i : i + 4])
        assert_same(found, whole[i + 3])
        assert_same(reverse, backwards[i + 3])


def test_logits_stay_after_more_tokens(tiny):
    session = Session(pyggml.load(tiny()), 8)
    first = session.feed([1, 2, 3])
    kept = first.copy()
    session.feed([4, 5, 6])
    np.testing.assert_array_equal(first, kept)


def test_a_full_cache_takes_nothing_more(tiny):
    session = Session(pyggml.load(tiny()), 4)
    session.feed([1, 2, 3])
    with pytest.raises(DataError, match=r"3 \+ 2 tokens do not fit into a context of 4"):
        session.feed([4, 5])
    assert session.n_past == 3
    session.feed([4])


@pytest.mark.parametrize("tokens", [[], [11], [-1], [1.5], [[1, 2]], "ab"])
def test_tokens_are_checked(tokens, tiny):
    model = pyggml.load(tiny())
    with pytest.raises(DataError, match=r"tokens: .* wanted"):
        model.logits(tokens)
    with pytest.raises(DataError, match=r"tokens: .* wanted"):
        Session(model, 4).feed(tokens)


def test_rows_of_logits_depend_on_earlier_tokens_only(tiny):
    model = pyggml.load(tiny("qwen3"))
    tokens = np.arange(20) % 11
    changed = tokens.copy()
    changed[15:] = 3
    one, other = model.logits(tokens), model.logits(changed)
    np.testing.assert_array_equal(one[:15], other[:15])
    assert np.abs(one[15:] - other[15:]).max() > 1e-3
