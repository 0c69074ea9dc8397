"""Log-probabilities out of packed passes, against logits of one sequence at a time."""

import numpy as np
import pytest

import pyggml
from pyggml.lora.evaluate.passes import Continuation, log_probs, together
from pyggml.lora.evaluate.scorer import Scorer
from pyggml.models.texts import fill


def by_hand(model, one):
    """ln softmax of the logits, in float64, at the places of the scored tokens."""
    logits = model.logits(one.ids[:-1]).astype(np.float64)
    at = np.arange(one.first - 1, len(one.ids) - 1)
    targets = np.array(one.ids[one.first :])
    return logits[at, targets] - np.log(np.exp(logits[at]).sum(axis=1))


def asked_of(n_vocab, seed=0):
    """Prompts of several lengths, each with choices: of one token, and longer, that begin alike."""
    rng = np.random.default_rng(seed)
    found = []
    for n in (1, 3, 11, 17, 30):
        prompt = rng.integers(0, n_vocab, n).tolist()
        choices = [5], [6], [7, 8], [7, 9, 10], rng.integers(0, n_vocab, 6).tolist()
        found += [Continuation((*prompt, *choice), n) for choice in choices]
    longest = found[-1]
    return [*found, Continuation(longest.ids, longest.first - 1), found[0]]


@pytest.mark.parametrize("n_tokens", [1, 40, 512])
def test_each_token_has_its_log_probability(tiny, n_tokens, monkeypatch):
    monkeypatch.setattr("pyggml.lora.evaluate.passes.N_TOKENS", n_tokens)
    monkeypatch.setattr("pyggml.lora.evaluate.passes._SCORED", 3)
    model, asked = pyggml.load(tiny, compute="f32"), asked_of(48)
    calls = []
    found = log_probs(model, asked, lambda done, n: calls.append((done, n)))
    for one, values in zip(asked, found, strict=True):
        assert values == pytest.approx(by_hand(model, one), rel=1e-5, abs=1e-5)
    n = calls[-1][1]
    assert calls == [(i + 1, n) for i in range(n)] and (n == 1) == (n_tokens == 512)


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_two_sequences_share_their_beginning(shared, arch, monkeypatch):
    """One lies before it, from right to left; also beginnings longer than a block of attention. A
    model with windows takes each by itself."""
    rng, taken = np.random.default_rng(5), []
    model = pyggml.load(shared / "fixtures" / f"{arch}-F16.gguf", compute="f32")
    asked = []
    for n in (9, 200, 30):
        prompt = rng.integers(0, 48, n).tolist()
        choices = (rng.integers(0, 48, length).tolist() for length in (40, 3, 12))
        asked += [Continuation((*prompt, *choice), n) for choice in choices]
    pack = together
    monkeypatch.setattr(
        "pyggml.lora.evaluate.passes.together",
        lambda lengths, most: (taken.extend(lengths), pack(lengths, most))[1],
    )
    for one, values in zip(asked, log_probs(model, asked), strict=True):
        assert values == pytest.approx(by_hand(model, one), rel=1e-4, abs=1e-4)
    repeated = sum(len(one.read) for one in asked)
    saved = 9 + 200 + 30 if arch == "llama" else 0
    assert sum(taken) == repeated - saved


@pytest.mark.parametrize("arch", ["gpt2", "gemma2", "mamba", "lfm2"])
def test_sequences_of_a_pass_do_not_see_each_other(shared, arch):
    """Also of models with learned positions, sliding windows and recurrent state."""
    model = pyggml.load(shared / "fixtures" / f"{arch}-F16.gguf", compute="f32")
    asked = asked_of(512, seed=3)
    for one, values in zip(asked, log_probs(model, asked), strict=True):
        assert values == pytest.approx(by_hand(model, one), rel=1e-4, abs=1e-4)


def test_choices_of_one_token_cost_their_prompt_once(tiny, monkeypatch):
    monkeypatch.setattr("pyggml.lora.evaluate.passes.N_TOKENS", 1)  # a pass for each sequence
    prompt = tuple(range(20))
    calls = []
    log_probs(
        pyggml.load(tiny),
        [Continuation((*prompt, token), 20) for token in range(9)],
        lambda done, n: calls.append(n),
    )
    assert calls == [1]


def test_sequences_share_passes():
    lengths = np.random.default_rng(4).integers(1, 100, 300).tolist()
    passes = together(lengths, 128)
    assert sorted(i for some in passes for i in some) == list(range(300))
    sums = [sum(lengths[i] for i in some) for some in passes]
    assert max(sums) <= 128 and sum(lengths) > 0.98 * 128 * (len(passes) - 1)
    assert together([5, 200], 200) == [[1], [0]]


@pytest.mark.quick
def test_a_prediction_is_right_where_the_wanted_token_is_the_likeliest(tiny):
    model = pyggml.load(tiny)
    ids = np.random.default_rng(0).integers(0, 48, 9).astype(np.int32)
    best = model.logits(ids).argmax(axis=1)
    scorer = Scorer(model, len(ids), 4)
    fill(scorer.inputs, ids)
    targets = np.where(np.arange(9) % 3 == 0, (best + 1) % 48, best)
    scores = scorer.score(np.arange(9), targets)
    assert scores.right.tolist() == [i % 3 != 0 for i in range(9)]
