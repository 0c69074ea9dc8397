"""How far models are from an original, against logits of one window after the other."""

import numpy as np
import pytest

import pyggml
from pyggml.lora.evaluate.distance import Distance, closed, distances
from pyggml.requantize import requantize


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_losses_and_divergences_are_those_of_the_logits(tiny, corpus_of, tmp_path):
    requantize(tiny, tmp_path / "q.gguf", "Q4_0")
    models = [pyggml.load(path, compute="f32") for path in (tiny, tmp_path / "q.gguf")]
    data = corpus_of(12, [13, 13], n_held_out=0).train  # each window is a document
    original, packed = distances(models, data)
    wanted = []
    for tokens in data.tokens:
        first, second = (log_softmax(model.logits(tokens[:-1])) for model in models)
        kl = (np.exp(first) * (first - second)).sum(-1)
        losses = [-np.take_along_axis(x, tokens[1:, None], 1)[:, 0] for x in (first, second)]
        wanted.append([*losses, kl])
    wanted = np.concatenate(wanted, 1)
    np.testing.assert_allclose(original.losses, wanted[0], atol=1e-5)
    np.testing.assert_allclose(packed.losses, wanted[1], atol=1e-5)
    np.testing.assert_allclose(packed.divergences, wanted[2], atol=1e-5)
    assert not original.divergences.any() and packed.divergence.value > 1e-4
    assert packed.clusters.tolist() == [0] * 12 + [1] * 12


def of(*losses):
    return Distance(np.array(losses), np.zeros(len(losses)), np.arange(len(losses)) // 2)


def test_the_gap_is_one_of_perplexities():
    original, quantised = of(1.0, 1.0, 1.0, 1.0), of(2.0, 2.0, 2.0, 2.0)
    half = np.log((np.e + np.e**2) / 2)
    share = closed(original, quantised, of(*[half] * 4))
    assert share.value == pytest.approx(0.5) and share.high - share.low < 1e-9
    apart = closed(original, quantised, of(half + 0.1, half + 0.1, half - 0.1, half - 0.1))
    assert apart.low < 0.5 < apart.high
    assert np.isnan(closed(original, original, quantised).value)
