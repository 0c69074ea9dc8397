"""Encoders, rerankers: llama.cpp's vectors and scores, gradients of all weights, refusals."""

import numpy as np
import pytest
from llama_embeddings import CASES, GOLDEN, TEXTS, golden, write

import pyggml
from pyggml.errors import ConfigError, ModelError
from pyggml.generation import Session
from pyggml.graph.tensor import leaf
from pyggml.look.check import check_gradient
from pyggml.models import ENCODERS, Inputs, Net, Parts, compose, small_metadata
from pyggml.models.build import build_vectors
from pyggml.models.pooling import Pool
from pyggml.models.texts import fill
from pyggml.ops import mul, sum_

from measures import nmse

# GELUs are rounded by llama.cpp's table; others differ as sums do.
LIMITS = {"neo-bert": 1e-11, "neo-bert-rank": 1e-11, "eurobert": 1e-11, "nomic-bert": 1e-11}
LIMITS |= {"qwen3": 1e-11, "qwen3-rank": 1e-11, "modern-bert-rank": 1e-6}
cases = pytest.mark.parametrize("name", CASES)


@pytest.fixture
def model(name, tmp_path):
    return pyggml.load(write(tmp_path / "model.gguf", name), compute="f32")


@cases
def test_vectors_and_scores_are_llama_cpp_s(name, model):
    _, pooling, _ = CASES[name]
    with np.load(GOLDEN) as arrays:
        wanted = arrays[name]
    found = model.embed(TEXTS, pooling, normalise=False)
    assert nmse(found, wanted) < LIMITS.get(name, 3e-7)
    assert np.ptp(wanted, axis=0).min() > 1e-4, "texts differ"


@cases
@pytest.mark.interop
def test_the_golden_file_is_llama_cpp_s(name, tmp_path):
    with np.load(GOLDEN) as arrays:
        np.testing.assert_allclose(golden(name, tmp_path), arrays[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", ENCODERS)
def test_every_weight_of_an_encoder_can_be_trained(architecture, rng):
    """The gradient of each tensor, with all that it may have, along its own direction."""
    sizes = {"embedding_length": 16, "feed_forward_length": 24, "attention.sliding_window": 4}
    metadata = small_metadata(ENCODERS[architecture], sizes)
    decoder = compose(metadata.get, {"token_embd.weight": (11, 16)}, "test")
    arrays = {
        name: rng.uniform(0.5, 1.5, s.shape)
        if "norm" in name
        else rng.standard_normal(s.shape) * s.shape[-1] ** -0.5
        for name, s in decoder.tensors().items()
        if not name.startswith("rope_")  # factors of frequencies are constants
    }
    inputs = Inputs.empty(19, causal=False)
    fill(inputs, rng.integers(0, 11, 12), rng.integers(0, 11, 7))
    pool = Pool.empty("mean", 2, 19)
    pool.fill([(0, 12), (12, 19)])
    weights = leaf(rng.standard_normal((2, 16)).astype(np.float32))

    def build(*leaves):
        named = {n: t.named(n) for n, t in zip(arrays, leaves, strict=True)}
        net = Net(named, inputs)
        return sum_(mul(build_vectors(Parts(decoder, named), net, pool), weights))

    slopes = check_gradient(build, [*arrays.values()], rng)
    errors = {name: s.error for name, s in zip(arrays, slopes, strict=True)}
    # A shift of all keys of a token changes no softmax.
    still = {n for n in errors if n.endswith("attn_k.bias")}
    assert max(e for n, e in errors.items() if n not in still) < 2e-4, errors


def test_an_encoder_predicts_no_token(tmp_path):
    model = pyggml.load(write(tmp_path / "model.gguf", "bert"))
    with pytest.raises(ModelError, match="bert is an encoder: it embeds texts"):
        model.logits([1, 2])
    with pytest.raises(ModelError, match="a bert whose tokens see later ones has no next token"):
        Session(model, 8)
    with pytest.raises(ConfigError, match="pooling 'rank' wants a classifier, which this bert"):
        model.embed([[1]], "rank")


def test_a_pattern_that_is_looked_at_is_biased_to_both_sides(tmp_path):
    model = pyggml.load(write(tmp_path / "model.gguf", "jina-bert-v2"), compute="f32")
    wanted = model.embed(TEXTS, "mean")
    with model.trace(scale={"*attn_pattern": 1.0}):
        np.testing.assert_allclose(model.embed(TEXTS, "mean"), wanted, atol=1e-5)
