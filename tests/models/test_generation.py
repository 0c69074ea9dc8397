"""Sampling draws from the cut and tempered softmax; generation is the model fed with itself."""

import numpy as np
import pytest

import pyggml
from pyggml.errors import ConfigError, DataError
from pyggml.generation import Sampling, Session, generate, sample
from pyggml.generation.passes import TokenPasses

LOGITS = np.array([0.0, 3.0, 1.0, 2.0, -1.0], np.float32)


def shares(how, n=4000):
    rng = np.random.default_rng(0)
    return np.bincount([sample(LOGITS, how, rng) for _ in range(n)], minlength=5) / n


def softmax(z):
    e = np.exp(z - np.max(z))
    return e / e.sum()


def test_temperature_0_takes_the_likeliest(rng):
    assert sample(LOGITS, Sampling(temperature=0), rng) == 1
    assert sample(np.array([1.0, 2.0, 2.0], np.float32), Sampling(temperature=0), rng) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_shares_follow_the_softmax(temperature):
    found = shares(Sampling(temperature=temperature, top_k=0, top_p=1.0, min_p=0))
    np.testing.assert_allclose(found, softmax(LOGITS / temperature), atol=0.03)


def test_top_k_keeps_the_k_likeliest():
    found = shares(Sampling(temperature=1.0, top_k=2, top_p=1.0, min_p=0))
    wanted = softmax(np.where(LOGITS >= 2, LOGITS, -np.inf))
    np.testing.assert_allclose(found, wanted, atol=0.03)
    assert shares(Sampling(temperature=9.0, top_k=1), 50)[1] == 1


def test_top_p_keeps_as_many_as_reach_p():
    p = softmax(LOGITS)
    assert p[1] < 0.7 < p[1] + p[3]
    found = shares(Sampling(temperature=1.0, top_k=0, top_p=0.7, min_p=0))
    assert (found > 0).tolist() == [False, True, False, True, False]
    assert shares(Sampling(temperature=9.0, top_k=0, top_p=1e-9), 50)[1] == 1


@pytest.mark.parametrize("temperature", [1e-3, 1e-300, 5e-324])
def test_hardly_any_temperature_is_like_none(temperature, rng):
    assert sample(1000 * LOGITS, Sampling(temperature=temperature), rng) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("worst", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_refused(temperature, worst, rng):
    logits = np.array([0.0, worst, -np.inf], np.float32)
    with pytest.raises(DataError, match=f"the greatest logit is {worst}, wanted a finite number"):
        sample(logits, Sampling(temperature=temperature), rng)
    with pytest.raises(DataError, match="the greatest logit is -inf"):
        sample(np.full(3, -np.inf), Sampling(temperature=temperature), rng)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_logit_of_minus_infinity_is_never_taken(temperature, rng):
    logits = np.array([-np.inf, 1.0, -np.inf], np.float32)
    assert sample(logits, Sampling(temperature=temperature), rng) == 1


def test_settings_out_of_range_are_all_named():
    with pytest.raises(ConfigError) as caught:
        Sampling(temperature=-1.0, top_k=-1, top_p=1.5, seed=-2)
    for name in ("temperature is -1.0", "top_k is -1", "top_p is 1.5", "seed is -2"):
        assert name in str(caught.value)


# -- generation ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(golden_file):
    return pyggml.load(golden_file("qwen3-F16.gguf"))


PROMPT = [5, 77, 301, 9]


@pytest.mark.quick
def test_greedy_text_is_what_the_model_says_of_its_own_text(model):
    text = [*PROMPT, *generate(model, PROMPT, 6)]
    assert len(text) == 10
    best = model.logits(text[:-1]).argmax(-1)
    assert text[4:] == best[3:].tolist()


def test_a_seed_gives_the_same_text_again(model):
    def text(seed):
        return list(generate(model, PROMPT, 8, Sampling(temperature=5.0, top_k=0, seed=seed)))

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_text_ends_at_an_end_of_text(model, monkeypatch):
    found = list(generate(model, PROMPT, 6))
    monkeypatch.setattr(type(model.tokenizer), "is_eog", lambda self, token: token == found[2])
    assert list(generate(model, PROMPT, 6)) == found[: found.index(found[2])]


def test_nothing_is_asked_for(model):
    assert list(generate(model, PROMPT, 0)) == []


def test_a_prompt_is_needed(model):
    with pytest.raises(DataError, match="tokens"):
        next(generate(model, [], 3))


@pytest.mark.parametrize(
    "counts, message",
    [
        ({"n_tokens": -5}, "n_tokens is -5, wanted 0 or more"),
        ({"n_tokens": 3, "n_ctx": 0}, "n_ctx is 0, wanted at least 1"),
        ({"n_tokens": 3, "n_ctx": -1}, "n_ctx is -1, wanted at least 1"),
    ],
)
def test_counts_out_of_range(model, counts, message):
    with pytest.raises(ConfigError, match=message):
        next(generate(model, PROMPT, **counts))


def test_rows_of_unlike_length_are_no_tokens(model):
    with pytest.raises(DataError, match="lists of unlike length, wanted one row of integers"):
        Session(model, 4).feed([[1], [2, 3]])


@pytest.mark.parametrize("token", [-1, 1 << 20, 2.5, True, 2**32 + 1, -(2**63)])
def test_one_token_outside_of_the_vocabulary_is_refused(model, token):
    session = Session(model, 4)
    with pytest.raises(DataError, match="tokens: "):
        session.feed([token])
    assert session.n_past == 0
    other = Session(model, 4)
    np.testing.assert_array_equal(session.feed([7]), other.feed(np.array([7])))


def test_the_context_ends_an_answer_and_refuses_a_longer_prompt(model):
    assert len(list(generate(model, PROMPT, 5, n_ctx=6))) == 2
    assert list(generate(model, PROMPT, 5, n_ctx=4)) == []
    with pytest.raises(DataError, match=r"0 \+ 4 tokens do not fit into a context of 3"):
        next(generate(model, PROMPT, 5, n_ctx=3))


def test_a_token_binds_nothing(model, monkeypatch):
    """From the second on, all that changes are the numbers of the inputs; memory is looked up of
    the logits alone, which are read."""
    session, whole = Session(model, 20), [*PROMPT, 3, 8, 11, 40, 7]
    session.feed(PROMPT)
    session.feed(whole[4:5])
    device = type(model.backend)
    attach, attached = device.attach, []

    def attach_one(self, tensor, arena, offset):
        attached.append(tensor)
        attach(self, tensor, arena, offset)

    for name in ("bind", "alloc"):
        monkeypatch.setattr(device, name, None)
    monkeypatch.setattr(device, "attach", attach_one)
    for token in whole[5:]:
        last = session.feed([token])
    monkeypatch.undo()
    assert len(attached) == len(whole[5:]) and len(set(attached)) == 1
    wanted = model.logits(whole)[-1]
    assert np.abs(last - wanted).max() < 0.02 * np.abs(wanted).max()


def test_prompts_of_all_lengths_keep_few_programs(model, monkeypatch):
    """A conversation's memory does not grow with the number of its prompts."""
    monkeypatch.setattr("pyggml.generation.passes._MOST_KEPT", 3)
    session, bound = Session(model, 160), []
    keep = TokenPasses._bind
    monkeypatch.setattr(
        TokenPasses, "_bind", lambda self, *key: (bound.append(key[1]), keep(self, *key))[1]
    )
    for n in (3, 1, 17, 30, 1, 4, 3, 1, 31):
        session.feed(np.arange(n))
    assert bound == [3, 1, 32, 4, 3, 32], "the longest unused give way; 17 to 32 tokens are one"
    assert len(session._batch._passes._bound) == 3
