"""Samplers against values worked out by hand, and what holds of them for any logits."""

import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pyggml.errors import ConfigError
from pyggml.generation import Sampler, Sampling, sample, sampler
from pyggml.generation.sampler import distribution, likeliest, logprobs
from pyggml.jit import JIT

ALL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # nothing is cut
# Probabilities 0.1, 0.4, 0.2, 0.3: their softmax is themselves.
SHARES = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))


def shares(logits=SHARES, **how):
    """id -> probability of the tokens that are drawn from."""
    ids, p = distribution(logits, Sampling(**ALL | how))
    return dict(zip(ids.tolist(), p.round(6).tolist(), strict=True))


# -- values by hand -----------------------------------------------------------------------------


def test_without_limits_the_softmax_is_drawn_from():
    assert shares() == {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}


def test_temperature_divides_the_logits():
    assert shares(temperature=0.5) == pytest.approx(
        {0: 0.01 / 0.3, 1: 0.16 / 0.3, 2: 0.04 / 0.3, 3: 0.09 / 0.3}, abs=1e-6
    )
    assert shares(temperature=0) == {1: 1.0}


@pytest.mark.quick
@pytest.mark.parametrize(
    "limits, wanted",
    [
        ({"top_k": 2}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_p": 0.5}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_p": 0.75}, {1: 4 / 9, 3: 3 / 9, 2: 2 / 9}),
        ({"top_p": 0.0}, {1: 1}),
        ({"min_p": 0.6}, {1: 4 / 7, 3: 3 / 7}),
        ({"min_p": 1.0}, {1: 1}),
        # top_p looks at what top_k left, whose shares are 4/7 and 3/7: 0.5 is reached by the first.
        ({"top_k": 2, "top_p": 0.5}, {1: 1}),
        # min_p and top_p look at temperature 1, whatever the temperature is.
        ({"min_p": 0.6, "temperature": 0.5}, {1: 16 / 25, 3: 9 / 25}),
        ({"top_p": 0.5, "temperature": 2.0}, {1: 2 / (2 + 3**0.5), 3: 3**0.5 / (2 + 3**0.5)}),
    ],
)
def test_limits(limits, wanted):
    assert shares(**limits) == pytest.approx(wanted, abs=1e-6)


def test_of_equal_logits_the_lower_ids_stay():
    assert [*shares(np.zeros(5, np.float32), top_k=2)] == [0, 1]


Z = np.array([2.0, -2.0, 1.0, 0.0], np.float32)


@pytest.mark.quick
@pytest.mark.parametrize(
    "how, recent, wanted",
    [
        ({"repeat_penalty": 2.0}, [0, 1, 3, 0], [1, -4, 1, 0]),
        ({"frequency_penalty": 0.5}, [0, 1, 0], [1, -2.5, 1, 0]),
        ({"presence_penalty": 0.5}, [0, 1, 0], [1.5, -2.5, 1, 0]),
        (
            {"repeat_penalty": 2.0, "frequency_penalty": 1.0, "presence_penalty": 4.0},
            [0, 0, 2],
            [1 - 2 - 4, -2, 0.5 - 1 - 4, 0],
        ),
        ({"repeat_penalty": 2.0, "repeat_last_n": 2}, [0, 2, 1], [2, -4, 0.5, 0]),
        ({"repeat_penalty": 2.0, "repeat_last_n": 0}, [0, 1], [2, -2, 1, 0]),
        ({"presence_penalty": 1.0, "repeat_last_n": -1}, [2] + [0] * 99, [1, -2, 0, 0]),
        ({"logit_bias": {0: -3, "2": 0.5}}, [], [-1, -2, 1.5, 0]),
        # The bias comes first, so the penalty sees a negative logit.
        ({"logit_bias": {0: -3}, "repeat_penalty": 2.0}, [0], [-2, -2, 1, 0]),
        ({"logit_bias": {1: -math.inf}, "repeat_penalty": 2.0}, [1], [2, -math.inf, 1, 0]),
    ],
)
def test_biases_and_penalties(how, recent, wanted):
    before = Z.copy()
    assert Sampler(Sampling(**how), recent=recent).adjust(Z).tolist() == wanted
    assert (before == Z).all(), "the model's logits stay as they are"


def test_sampled_tokens_are_recent_too():
    sampler = Sampler(Sampling(temperature=0, presence_penalty=1.5, repeat_last_n=2))
    assert [sampler(Z) for _ in range(5)] == [0, 2, 0, 0, 2]


def test_a_bias_by_text_reaches_each_of_its_tokens(tiny_tokenizer):
    the = tiny_tokenizer.encode("the", add_special=False)
    assert len(the) == 2
    how = Sampling(logit_bias={"the": 2.0, the[0]: 1.0, " ": -math.inf})
    z = Sampler(how, tiny_tokenizer).adjust(np.zeros(tiny_tokenizer.n_vocab, np.float32))
    (space,) = tiny_tokenizer.encode(" ", add_special=False)
    wanted = {the[0]: 3.0, the[1]: 2.0, space: -math.inf}
    assert {int(i): float(z[i]) for i in np.flatnonzero(z)} == wanted


def test_biases_that_leave_no_token_are_refused(tiny_tokenizer):
    """Where they name the whole vocabulary at once; else where the model has no other token."""
    n = tiny_tokenizer.n_vocab
    every = dict.fromkeys(range(n), -math.inf)
    with pytest.raises(ConfigError, match=f"logit_bias forbids all {n} tokens of the model"):
        Sampler(Sampling(logit_bias=every), tiny_tokenizer)
    sampler = Sampler(Sampling(logit_bias=every | {3: 1.0}), tiny_tokenizer)
    assert sampler(np.zeros(n, np.float32)) == 3
    alone = np.where(np.arange(n) == 5, 0.0, -np.inf).astype(np.float32)
    with pytest.raises(ConfigError, match="logit_bias forbids every token that the model can"):
        sampler(np.where(np.arange(n) == 3, -np.inf, alone))


@pytest.mark.parametrize("token", [-1, 258, "258", "9" * 30])
def test_a_bias_of_no_token_is_refused(tiny_tokenizer, token):
    with pytest.raises(ConfigError, match="logit_bias names .*, which is no token of the model"):
        Sampler(Sampling(logit_bias={token: 1}), tiny_tokenizer)


@pytest.mark.parametrize(
    "name, value",
    [
        *[("temperature", t) for t in (-0.1, 101, math.nan, "1", True)],
        *[("top_k", k) for k in (-1, 1.5)],
        *[(name, p) for name in ("top_p", "min_p") for p in (-0.1, 1.1, math.nan)],
        *[("repeat_penalty", r) for r in (0, 1e-320, 0.009, -1, math.inf, math.nan)],
        *[("frequency_penalty", 101), ("presence_penalty", math.nan), ("repeat_last_n", -2)],
        *[("logit_bias", b) for b in ({"": 1}, {"a": math.inf}, {"a": math.nan}, {"a": "b"}, [1])],
        *[("logit_bias", {"a": 10**400}), ("seed", 1 << 64), ("seed", -2)],
        *[("stop", s) for s in ("the", ("",), ("a",) * 17, ("a" * 257,), (1,))],
        *[("logprobs", n) for n in (-1, 101, True, 2.0)],
    ],
)
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ConfigError, match=rf"^{name} is .*, wanted \S"):
        Sampling(**{name: value})


def test_log_probabilities_are_those_of_the_softmax():
    chosen, top = logprobs(SHARES + 100, 2, 2)
    assert chosen == pytest.approx(math.log(0.2), abs=1e-5)
    assert [i for i, _ in top] == [1, 3]
    assert [p for _, p in top] == pytest.approx([math.log(0.4), math.log(0.3)], abs=1e-5)
    assert logprobs(SHARES, 0, 0)[1] == ()


def test_the_page_on_generation_has_every_setting_and_its_default():
    page = (Path(__file__).parents[2] / "docs/generation.md").read_text("utf-8")
    for field in fields(Sampling):
        flag = "--temp" if field.name == "temperature" else "--" + field.name.replace("_", "-")
        assert f"`{flag}" in page or f" {flag} " in page, flag
        row = next((line for line in page.splitlines() if line.startswith(f"| `{flag} ")), "")
        if row and field.default is not None:
            assert float(row.split("|")[2]) == field.default


# -- properties ---------------------------------------------------------------------------------

FINITE = st.floats(-50, 50, width=32)
LOGITS = arrays.arrays(np.float32, st.integers(1, 300), elements=FINITE)


@given(LOGITS, st.integers(1, 400))
def test_the_likeliest_are_a_sort_s_first(z, k):
    assert likeliest(z, k).tolist() == np.argsort(-z, kind="stable")[:k].tolist()


@given(st.integers(0, 2**32), st.sampled_from([1, 40, 300, 3000, 99_999]), st.integers(0, 3))
@settings(max_examples=30)
def test_the_likeliest_of_many_are_a_sort_s_first(seed, k, decimals):
    z = np.random.default_rng(seed).normal(0, 3, 100_000).round(decimals).astype(np.float32)
    assert likeliest(z, k).tolist() == np.argsort(-z, kind="stable")[:k].tolist()
    if k <= 256:
        assert [*shares(z, top_k=k)] == likeliest(z, k).tolist()


@given(LOGITS, st.floats(0, 1), st.floats(0, 1), st.integers(0, 50), st.floats(0, 10))
def test_the_likeliest_token_always_stays(z, top_p, min_p, top_k, temperature):
    how = Sampling(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)
    ids, p = distribution(z, how)
    assert z[ids].max() == z.max() and len(set(ids.tolist())) == len(ids)
    assert p.sum() == pytest.approx(1) and p.argmax() == z[ids].argmax()


@given(st.integers(0, 2**32), st.floats(0.01, 0.999), st.floats(0.1, 4))
@settings(max_examples=30)
def test_top_p_keeps_the_shortest_head_of_many(seed, top_p, spread):
    z = np.random.default_rng(seed).normal(0, spread, 20_000).astype(np.float32)
    ids, _ = distribution(z, Sampling(**ALL | {"top_p": top_p}))
    p = np.exp(z.astype(np.float64) - z.max())
    sums = np.cumsum(p[np.argsort(-z, kind="stable")]) / p.sum()
    assert abs(len(ids) - 1 - np.searchsorted(sums, top_p)) <= 1


@given(LOGITS, st.floats(0, 1), st.floats(0, 1), st.integers(1, 50), st.floats(0.01, 10))
def test_the_compiled_chain_is_numpy_s(z, top_p, min_p, top_k, temperature):
    how = Sampling(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)
    ids, p = distribution(z, how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "JIT", False)
        wanted_ids, wanted = distribution(z, how)
    assert ids.tolist() == wanted_ids.tolist()
    np.testing.assert_allclose(p, wanted, rtol=1e-12, atol=1e-300)


@given(LOGITS, st.integers(0, 2**64 - 1))
def test_a_seed_gives_the_same_tokens_again(z, seed):
    first, again = (Sampler(Sampling(seed=seed, temperature=2.0)) for _ in range(2))
    assert [first(z) for _ in range(5)] == [again(z) for _ in range(5)]


def test_without_a_seed_tokens_differ():
    z = np.zeros(10_000, np.float32)
    first, again = (Sampler(Sampling(**ALL)) for _ in range(2))
    assert [first(z) for _ in range(5)] != [again(z) for _ in range(5)]
    assert first.how.seed >= 0


def test_a_token_without_a_share_is_never_drawn():
    z = np.array([-np.inf, 0.0, -np.inf, 0.0, -np.inf], np.float32)
    rng = np.random.default_rng(0)
    assert {sample(z, Sampling(**ALL), rng) for _ in range(300)} == {1, 3}

    class Zero:
        def random(self):
            return 0.0

    assert sample(z, Sampling(**ALL), Zero()) == 1


# -- speed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"top_k": 0}, {"top_k": 0, "min_p": 0.0, "top_p": 0.95}])
def test_a_vocabulary_of_150_000_is_not_sorted(how, rng, monkeypatch):
    """Sorting it takes 10 to 20 ms, a token of a small model 30."""
    z = rng.normal(0, 3, 150_000).astype(np.float32)
    draws = Sampler(Sampling(seed=0, repeat_penalty=1.1, **how), recent=range(64))
    sizes = []
    for name in ("sort", "argsort"):
        sort = getattr(np, name)
        monkeypatch.setattr(np, name, lambda a, f=sort, **how: sizes.append(len(a)) or f(a, **how))
    draws(z)
    # Compiled code, which takes the likeliest by insertion, calls none of both.
    assert (sizes or JIT) and max(sizes, default=0) < 20_000
