"""Circuits of heads, held to what the model computes."""

import numpy as np
import pytest

import pyggml
from pyggml import lab
from pyggml.errors import ConfigError, DataError
from pyggml.graph.arrays import read
from pyggml.lab.linear import embeddings, exact


def normalised(x, eps=1e-6):
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def run(model, ids, layer):
    """The stream before a block and what its attention makes of it."""
    before = f"blk.{layer - 1}.out" if layer else "token_embd"
    with model.trace(before, f"blk.{layer}.*", f"blk.{layer}.attn_pattern") as t:
        model.logits(ids)
    return normalised(t[before]), t


@pytest.mark.quick
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_patterns_times_ov_are_what_attention_adds(name, request, clean):
    """Shared values, the norm's weight, and an adapter are in it."""
    model = request.getfixturevalue(name)
    x, t = run(exact(model), clean, 1)
    total = 0
    for h in range(4):
        circuit = lab.ov_circuit(model, 1, h)
        assert circuit.left.shape == (256, 64) and circuit.shape == (256, 256)
        total = total + t["blk.1.attn_pattern"][:, h] @ (x @ circuit.left @ circuit.right)
    np.testing.assert_allclose(total, t["blk.1.attn_out"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_softmax_of_qk_is_the_pattern(name, request, clean):
    """At each distance; of qwen3 up to the scale of each query's and each key's norm."""
    model = request.getfixturevalue(name)
    x, t = run(exact(model), clean, 1)
    n, head = len(clean), 3
    scores = np.full((n, n), -np.inf)
    for d in range(n):
        circuit = lab.qk_circuit(model, 1, head, d)
        for i in range(d, n):
            scores[i, i - d] = x[i] @ circuit.left @ circuit.right @ x[i - d]
    if name == "qwen3":
        rms = [
            np.sqrt((t[f"blk.1.attn_{p}"].reshape(n, -1, 64)[:, h] ** 2).mean(axis=1) + 1e-6)
            for p, h in (("q", head), ("k", head // 2))
        ]
        scores /= np.outer(*rms)
    pattern = np.exp(scores - scores.max(axis=1, keepdims=True))
    pattern /= pattern.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(pattern, t["blk.1.attn_pattern"][:, head], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma2-F16", "phi3-F16", "gpt2-F16"])
def test_values_of_other_architectures_are_those_of_the_circuit(name, opened, clean):
    """A norm behind attention, one matrix for all three, a layer norm and biases."""
    model = exact(opened(name))
    with model.trace("blk.0.attn_norm", "blk.0.v") as t:
        model.logits(clean)
    weight = read(model.parts.weights["blk.0.attn_norm.weight"])
    x = (t["blk.0.attn_norm"][0] - t["blk.0.attn_norm"][1]) / weight  # a difference has no bias
    values = t["blk.0.v"][:, 1 // (4 // t["blk.0.v"].shape[1])]
    circuit = lab.ov_circuit(model, 0, 1)
    np.testing.assert_allclose(x @ circuit.left, values[0] - values[1], rtol=0, atol=2e-5)


def test_eigenvalues_and_singular_values_are_those_of_the_whole_matrix(llama):
    circuit = lab.ov_circuit(llama, 0, 1)
    whole = np.linalg.eigvals(circuit.full())
    whole = whole[np.argsort(-np.abs(whole))][:64]
    np.testing.assert_allclose(np.abs(circuit.eigenvalues()), np.abs(whole), rtol=1e-6)
    np.testing.assert_allclose(circuit.eigenvalues().sum(), np.trace(circuit.full()), rtol=1e-9)
    exactly = np.linalg.svd(circuit.full(), compute_uv=False)[:64]
    np.testing.assert_allclose(circuit.singular_values(), exactly, rtol=1e-9)
    with pytest.raises(ConfigError, match=r"a matrix of \(3, 4\) has no eigenvalues"):
        lab.Factored(np.ones((3, 2)), np.ones((2, 4))).eigenvalues()


def test_copying_and_promoted_tokens_are_those_of_the_whole_matrix(qwen3):
    """Embedding · OV · last norm · unembedding, which the lab never makes."""
    model = exact(qwen3)
    circuit = lab.ov_circuit(qwen3, 1, 2)
    e = embeddings(model, np.arange(512)).astype(np.float64)
    w, output = read(model.parts.weights["output_norm.weight"]), f"{model.parts.output_name}.weight"
    head = np.array(model.file.data(output), np.float64)
    whole = e @ circuit.full() @ (w * head).T
    values = np.linalg.eigvals(whole)
    expected = values.sum().real / np.abs(values).sum()
    assert lab.copying_score(qwen3, 1, 2) == pytest.approx(expected, abs=1e-4)
    ids, logits = lab.promoted_tokens(qwen3, 1, 2, token=9, n=4)
    np.testing.assert_array_equal(ids, np.argsort(-whole[9])[:4])
    np.testing.assert_allclose(logits, whole[9, ids], rtol=1e-4)


def test_what_does_not_fit_is_refused(llama, opened):
    with pytest.raises(ConfigError, match="there is no block 2 among the model's 2"):
        lab.ov_circuit(llama, 2, 0)
    with pytest.raises(ConfigError, match="block 1 has no head 9 among its 4"):
        lab.qk_circuit(llama, 1, 9)
    with pytest.raises(ConfigError, match="head is 0.5, wanted a whole number"):
        lab.ov_circuit(llama, 1, 0.5)
    with pytest.raises(ConfigError, match="block 0 of lfm2 has no attention heads"):
        lab.copying_score(opened("lfm2-Q4_K_M"), 0, 0)
    with pytest.raises(ConfigError, match="distance is 512, wanted 0 to 511"):
        lab.qk_circuit(llama, 1, 0, distance=512)
    with pytest.raises(DataError, match="n is 0, wanted 1 to the 512 tokens"):
        lab.promoted_tokens(llama, 1, 0, 5, n=0)
    with pytest.raises(DataError, match="wanted 0 to 511"):
        lab.promoted_tokens(llama, 1, 0, 512)
    assert pyggml.lab is lab
