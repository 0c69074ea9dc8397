"""Baichuan of 32 and 40 layers: llama.cpp knows by these numbers which positions a model has."""

import numpy as np
import pytest
import tiny_models
from tiny_models import NO_VOCABULARY, scaled

import pyggml
from pyggml.generation import Session

from measures import nmse
from peers.trial import llama_cpp_logits, trained

N_VOCAB, N_EMBD = 32, 24
TOKENS = np.random.default_rng(0).integers(0, N_VOCAB, 24)


@pytest.fixture
def path(n_layer, tmp_path):
    """A model with six heads, so that ALiBi's slopes are of both kinds."""
    sizes = {"block_count": n_layer, "embedding_length": N_EMBD, "feed_forward_length": 32}
    sizes |= {"attention.head_count": 6, "attention.head_count_kv": 6, "vocab_size": N_VOCAB}
    sizes |= {"rope.dimension_count": 4}
    path = tmp_path / "b.gguf"
    return tiny_models.write(
        path, "baichuan", sizes, NO_VOCABULARY, n_vocab=N_VOCAB, numbers=scaled
    )


@pytest.mark.interop
@pytest.mark.parametrize("n_layer", [32, 40])
def test_llama_cpp_has_the_same_logits(path, tmp_path):
    model = pyggml.load(path, compute="f32")
    before = model.logits(TOKENS)
    assert nmse(llama_cpp_logits(path, TOKENS), before) < 1e-10
    adapter = trained(model)
    adapter.save(tmp_path / "adapter.gguf")
    ours = adapter.model.logits(TOKENS)
    assert nmse(ours, before) > 1e-2
    assert nmse(llama_cpp_logits(path, TOKENS, tmp_path / "adapter.gguf"), ours) < 1e-10


@pytest.mark.parametrize("n_layer", [40])
def test_a_cache_changes_nothing(path):
    model = pyggml.load(path, compute="f32")
    session, whole = Session(model, 24), model.logits(TOKENS)
    for first, last in ((0, 9), (9, 10), (10, 17), (17, 24)):
        assert nmse(session.feed(TOKENS[first:last]), whole[last - 1]) < 1e-10
