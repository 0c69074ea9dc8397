"""Texts as vectors: pooled hidden states, of causal models and of those that read both ways."""

import numpy as np
import pytest

import pyggml
from pyggml.errors import ConfigError, DataError, ModelError
from pyggml.generation import Session
from pyggml.graph import Graph
from pyggml.graph.tensor import leaf
from pyggml.look.check import check_gradient
from pyggml.models.pooling import POOLED, Pool, pooled
from pyggml.models.texts import both_ways
from pyggml.ops import mul, sum_
from pyggml.runtime import results

N_VOCAB = 11
TEXTS = [np.arange(n) * (3 + i) % N_VOCAB for i, n in enumerate((7, 1, 12, 5))]


@pytest.fixture
def llama(tiny):
    def open_llama(**keys):
        named = {f"llama.{k.replace('__', '.')}": v for k, v in keys.items()}
        return pyggml.load(tiny("llama", keys=named), compute="f32")

    return open_llama


def hidden_of(model, text):
    """What the last norm gives of a text alone, (tokens, n_embd)."""
    with model.trace("output_norm") as t:
        model.logits(text)
    return t["output_norm"]


POOLS = {"mean": lambda h: h.mean(axis=0), "cls": lambda h: h[0], "last": lambda h: h[-1]}


@pytest.mark.quick
@pytest.mark.parametrize("causal", [True, False])
def test_vectors_are_the_pooled_hidden_states_of_each_text(llama, causal):
    model = llama(attention__causal=causal)
    hidden = [hidden_of(model, text) for text in TEXTS]
    for name, pool in POOLS.items():
        found = model.embed(TEXTS, name, normalise=False)
        np.testing.assert_allclose(found, [pool(h) for h in hidden], rtol=0, atol=1e-4)
        unit = found / np.linalg.norm(found, axis=1, keepdims=True)
        np.testing.assert_allclose(model.embed(TEXTS, name), unit, rtol=0, atol=1e-6)
    for found, wanted in zip(model.embed(TEXTS, "none", normalise=False), hidden, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


def test_the_file_says_how_texts_are_pooled_and_what_tokens_see(llama):
    unsaid = {True: "last", False: "mean"}
    for causal, usual in unsaid.items():
        assert llama(attention__causal=causal).embedder().pooling == usual
    assert llama(pooling_type=2).embedder().pooling == "cls"
    for unspecified in (-1, 2**32 - 1):  # the second as llama.cpp writes it
        assert llama(pooling_type=unspecified).embedder().pooling == "last"
    first, both = (llama(attention__causal=causal) for causal in (True, False))
    changed = [*TEXTS[0][:-1], 9]
    for model, moves in ((first, False), (both, True)):
        before, after = model.embed([TEXTS[0], changed], "cls")
        assert np.allclose(before, after, atol=1e-6) != moves


def test_a_pattern_that_is_looked_at_reads_both_ways_too(llama):
    model = llama(attention__causal=False)
    with model.trace("*attn_pattern") as t:
        seen = model.logits(TEXTS[2])
    assert (t["blk.1.attn_pattern"] > 0).all()
    np.testing.assert_allclose(seen, model.logits(TEXTS[2]), rtol=0, atol=2e-4)


def test_spans_of_causal_texts_become_those_of_whole_texts():
    span = np.array([[0, 1], [0, 2], [2, 3], [3, 4], [3, 5]], np.int32)
    assert both_ways(span).tolist() == [[0, 2], [0, 2], [2, 3], [3, 5], [3, 5]]


@pytest.mark.parametrize("name", POOLED)
def test_pooling_has_a_gradient(name, rng):
    pool = Pool.empty(name, 3, 9)
    pool.fill([(0, 4), (4, 5), (5, 9)])

    def loss(hidden):
        weighed = mul(pooled(hidden, pool), leaf(weights))
        return sum_(weighed)

    weights = rng.standard_normal((3, 5)).astype(np.float32)
    (slope,) = check_gradient(loss, [rng.standard_normal((9, 5))], rng)
    assert slope.error < 1e-5 and slope.scale > 0.1


def test_a_pool_without_a_text_has_zeros_in_the_mean():
    pool = Pool.empty("mean", 2, 4)
    pool.fill([(1, 3)])
    hidden = leaf(np.arange(8, dtype=np.float32).reshape(4, 2))
    (found,) = results(Graph.of(pooled(hidden, pool)))
    assert found.tolist() == [[3, 4], [0, 0]]


def test_what_cannot_be_embedded_is_refused(llama):
    model = llama()
    with pytest.raises(ConfigError, match="pooling is 'men', known are .*mean.*did you mean"):
        model.embed(TEXTS, "men")
    with pytest.raises(DataError, match=r"texts\[1\]: 65 tokens, wanted at most the 64"):
        model.embed([[1], [1] * 65])
    with pytest.raises(DataError, match="texts is one string"):
        model.embed("text")
    assert len(model.embed([])) == 0


def test_what_sees_later_tokens_continues_no_text(llama):
    with pytest.raises(ModelError, match="a llama whose tokens see later ones has no next token"):
        Session(llama(attention__causal=False), 8)


def test_a_classifier_s_only_row_may_be_a_vector(tiny, rng):
    """As llama.cpp writes it, whose tensors have no outer axes of one."""
    row, scores = rng.standard_normal((1, 16)).astype(np.float32), []
    for head in (row, row[0]):
        model = pyggml.load(tiny("qwen3", tensors={"cls.output.weight": head}), compute="f32")
        scores.append(model.embed(TEXTS, "rank", normalise=False))
    assert np.shape(scores[0]) == (len(TEXTS), 1)
    np.testing.assert_array_equal(scores[1], scores[0])
