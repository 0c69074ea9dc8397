"""What is drawn from, against llama.cpp's own chain of samplers."""

import ctypes
import math

import numpy as np
import pytest
from extras import need
from hypothesis import given
from hypothesis import strategies as st

from pyggml.generation import Sampler, Sampling
from pyggml.generation.sampler import distribution

pytestmark = pytest.mark.interop

N_VOCAB = 5000
RECENT = [3, 3, 3, 17, 40, 17, 99, 4999, 0, 250]


@pytest.fixture(scope="module")
def llama():
    return need("llama_cpp")


def chain(llama, how):
    """The samplers that llama.cpp's common_sampler_init puts in a row, up to the draw."""
    found = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    biases = [llama.llama_logit_bias(i, b) for i, b in (how.logit_bias or {}).items()]
    array = (llama.llama_logit_bias * len(biases))(*biases)
    penalties = (how.repeat_penalty, how.frequency_penalty, how.presence_penalty)
    for sampler in (
        llama.llama_sampler_init_logit_bias(N_VOCAB, len(biases), array),
        llama.llama_sampler_init_penalties(N_VOCAB, how.repeat_last_n, *penalties),
        llama.llama_sampler_init_top_k(how.top_k),
        llama.llama_sampler_init_top_p(how.top_p, 0),
        llama.llama_sampler_init_min_p(how.min_p, 0),
        llama.llama_sampler_init_temp(how.temperature),
        llama.llama_sampler_init_dist(1),
    ):
        llama.llama_sampler_chain_add(found, sampler)
    return found


def theirs(llama, how, logits):
    """Token id -> probability, of tokens that have one."""
    sampler = chain(llama, how)
    for token in RECENT:
        llama.llama_sampler_accept(sampler, token)
    data = (llama.llama_token_data * N_VOCAB)()
    for i, z in enumerate(logits):
        data[i].id, data[i].logit = i, z
    tokens = llama.llama_token_data_array(data, N_VOCAB, -1, False)
    llama.llama_sampler_apply(sampler, ctypes.byref(tokens))
    llama.llama_sampler_free(sampler)
    return {t.id: t.p for t in tokens.data[: tokens.size] if t.p > 0}


def ours(how, logits):
    ids, p = distribution(Sampler(how, recent=RECENT).adjust(logits), how)
    return {int(i): float(x) for i, x in zip(ids, p, strict=True) if x > 0}


@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.0, "repeat_penalty": 1.3},
        {"temperature": 1.7, "top_k": 7},
        {"top_k": 0},
        {"top_k": 0, "min_p": 0.0},
        {"top_k": 0, "min_p": 0.0, "top_p": 1.0},
        {"top_k": 0, "top_p": 0.3, "min_p": 0.3},
        {"top_k": 100, "min_p": 0.0, "top_p": 0.5, "temperature": 0.3},
        {"repeat_penalty": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"repeat_penalty": 0.7, "repeat_last_n": 4, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"frequency_penalty": 0.6, "presence_penalty": -0.4, "top_k": 0, "top_p": 1.0},
        {"logit_bias": {3: 6.0, 17: -math.inf, 8: 4.5}, "repeat_penalty": 1.2, "top_k": 20},
    ],
    ids=str,
)
def test_the_distribution_is_llama_cpp_s(llama, rng, how, spread):
    compare(llama, rng, how, spread)


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0.1, 3),
        "top_k": st.integers(0, 200),
        "top_p": st.floats(0.05, 1),
        "min_p": st.floats(0, 0.5),
        "repeat_penalty": st.floats(0.5, 2),
        "repeat_last_n": st.integers(1, 12),
        "frequency_penalty": st.floats(-1, 1),
        "presence_penalty": st.floats(-1, 1),
    },
)


@given(how=SETTINGS, seed=st.integers(0, 2**32 - 1), spread=st.floats(0.5, 6))
def test_drawn_settings(llama, how, seed, spread):
    compare(llama, np.random.default_rng(seed), how, spread)


def compare(llama, rng, how, spread):
    settings = Sampling(**how)
    logits = rng.normal(0, spread, N_VOCAB).astype(np.float32)
    logits[RECENT] += 2 * spread  # so that penalties matter
    logits[RECENT[3:5]] = -0.5 * spread
    wanted = theirs(llama, settings, logits)
    found = ours(settings, logits)
    assert found.keys() == wanted.keys()
    np.testing.assert_allclose([found[i] for i in wanted], [*wanted.values()], rtol=1e-4)
