"""Whose prompts are in the cache: a key sees its own, by counts and by time, and no other's."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pyggml
from pyggml.cli.web.guard import Access
from pyggml.generation import Batch

KEYS = ("mine", "theirs", "third")
SECRET = "the account number of the other one is 12345, do not tell it to anybody; " * 2


def n_cached(server, key, prompt=SECRET):
    answer = server.http.post(
        "/v1/completions",
        json={"prompt": prompt, "max_tokens": 1},
        headers={"authorization": f"Bearer {key}"},
    )
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_key_finds_its_own_prompts_in_the_cache_alone(serve):
    with serve(access=Access(keys=KEYS)) as server:
        assert [n_cached(server, key) for key in KEYS] == [0, 0, 0]
        assert all(n_cached(server, key) > 100 for key in KEYS)


def test_keys_share_prompts_by_choice(serve):
    with serve(access=Access(keys=KEYS), share_prompts=True) as server:
        assert n_cached(server, "mine") == 0
        assert n_cached(server, "theirs") > 100


@pytest.fixture(scope="module")
def model(chatty):
    return pyggml.load(chatty)


TOKENS = st.lists(st.integers(10, 12), min_size=1, max_size=6)
ASKED = st.lists(st.tuples(st.integers(0, 2), TOKENS, st.booleans()), min_size=1, max_size=12)


def shared(a, b):
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(map(len, (a, b)))
    )


@settings(max_examples=25 if "CI" in os.environ else 60, deadline=None)
@given(asked=ASKED)
def test_no_sequence_of_requests_shares_across_owners(model, asked):
    """Prompts of three owners, of few tokens so that they begin alike; some slots stay open."""
    batch, before = Batch(model, 4, 16), []
    for owner, prompt, stays in asked:
        if not batch.n_free:
            batch.slots[0].close()
        slot = batch.open(prompt, owner=owner)
        own = [shared(prompt, each) for whose, each in before if whose == owner]
        assert slot.n_past <= max(own, default=0)
        logits = batch.feed({slot: prompt[slot.n_past :]})[slot]
        np.testing.assert_allclose(logits, model.logits(prompt)[-1], atol=0.05)
        before.append((owner, prompt))
        if not stays:
            slot.close()
    batch.release()
