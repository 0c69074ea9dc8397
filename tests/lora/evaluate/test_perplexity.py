"""Perplexity as llama.cpp computes it, against logits taken one chunk at a time."""

from dataclasses import replace

import numpy as np
import pytest

import pyggml
from pyggml.errors import ConfigError, DataError
from pyggml.graph.tensor import leaf
from pyggml.lora import attach, loss_and_grads, perplexity


class Numbers:
    """A tokenizer of texts that are token ids in decimal."""

    bos_id = 5

    def __init__(self, add_bos):
        self.add_bos = add_bos

    def encode(self, text, parse_special=False):
        return [self.bos_id] * self.add_bos + [int(word) for word in text.split()]


def model_with(path, add_bos, compute="auto"):
    model = pyggml.load(path, compute=compute)
    model.__dict__["tokenizer"] = Numbers(add_bos)
    return model


EDITS = [
    {},
    {"scale": {"blk.0.out": 0.5}},
    {"scale": {"output": 0.3}, "add": {"logits": 0.5, "blk.1.out": 1.0}, "tokens": [5, 6, -2]},
]


@pytest.mark.parametrize("edits", EDITS, ids=["plain", "edited", "edited in places"])
@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("n_ctx", [8, 11])
def test_the_second_half_of_every_chunk_is_scored(tiny, add_bos, n_ctx, edits):
    model = model_with(tiny, add_bos)
    with model.trace("blk.0.out", **edits):
        _check_second_halves(model, add_bos, n_ctx)
    changed, plain = perplexity_of_ones(model, edits), perplexity_of_ones(model, {})
    assert (changed != plain) == bool(edits)


def perplexity_of_ones(model, edits):
    with model.trace(**edits):
        return [p.value for p in perplexity(model, "1 2 3 4 5 6 7 8 " * 4, 8)]


def _check_second_halves(model, add_bos, n_ctx):
    ids = np.random.default_rng(0).integers(0, 48, 3 * n_ctx + 2)
    text = " ".join(map(str, ids))
    found = list(perplexity(model, text, n_ctx))
    losses = []
    for chunk in np.array(model.tokenizer.encode(text))[: 3 * n_ctx].reshape(3, n_ctx):
        seen = chunk.copy()
        if add_bos:
            seen[0] = Numbers.bos_id
        logits = model.logits(seen).astype(np.float64)
        losses += [
            np.log(np.exp(logits[i]).sum()) - logits[i, chunk[i + 1]]
            for i in range(n_ctx // 2, n_ctx - 1)
        ]
    assert [p.chunk for p in found] == [1, 2, 3] and found[0].n_chunks == 3
    per_chunk = n_ctx - n_ctx // 2 - 1
    for i, p in enumerate(found, 1):
        some = np.array(losses[: i * per_chunk])
        assert p.n_tokens == len(some)
        assert p.value == pytest.approx(np.exp(some.mean()), rel=1e-5)
        error = np.exp(some.mean()) * some.std() / np.sqrt(len(some) - 1)
        assert p.error == pytest.approx(error, rel=1e-4)


def test_documents_are_scored_as_validation_does(tiny, corpus_of):
    """Every target, none across documents: the exponential of the mean loss over each apart. In
    float32: what a loss with gradients attends to may be rounded."""
    model = model_with(tiny, False, "f32")
    windows = corpus_of(10, [30, 12, 7, 1, 21], n_held_out=0).train
    model = attach(model).model  # adds nothing yet, but loss_and_grads wants one
    total = n = 0
    for tokens, documents in zip(windows.tokens, windows.documents, strict=True):
        for document in set(documents.tolist()):
            ids = tokens[documents == document]
            if len(ids) > 1:
                total += loss_and_grads(model, ids)[0] * (len(ids) - 1)
                n += len(ids) - 1
    found = list(perplexity(model, windows))
    assert (len(found), found[-1].n_chunks, found[-1].n_tokens) == (len(windows), len(windows), n)
    assert found[-1].value == pytest.approx(np.exp(total / n), rel=1e-5)


def test_logits_are_made_for_a_few_positions_at_a_time(tiny, monkeypatch):
    text = " ".join(map(str, np.arange(64) * 5 % 48))
    whole = list(perplexity(model_with(tiny, False), text, 32))[-1]
    monkeypatch.setattr("pyggml.lora.evaluate.scorer._LOGITS_BYTES", 1)
    assert list(perplexity(model_with(tiny, False), text, 32))[-1].value == pytest.approx(
        whole.value, rel=1e-6
    )


def test_a_text_that_is_too_short_and_a_context_that_is_too_long_are_refused(tiny):
    with pytest.raises(DataError, match="has 15 tokens, wanted at least 16"):
        next(perplexity(model_with(tiny, False), "1 2 3 " * 5, 8))
    with pytest.raises(ConfigError, match="n_ctx is 65, wanted 4 to the model's 64"):
        next(perplexity(model_with(tiny, False), "1 2 3", 65))


def test_a_model_that_is_sure_of_what_is_wrong_has_no_finite_perplexity(tiny):
    """A mean loss of more than 709 is beyond what e^x can say; llama.cpp prints infinity too."""
    model = model_with(tiny, False)
    weights = dict(model.parts.weights)
    weights["output.weight"] = leaf(1e5 * weights["output.weight"].data, "output.weight")
    model.parts = replace(model.parts, weights=weights)
    last = list(perplexity(model, " ".join(map(str, range(40))), 8))[-1]
    assert last.value == np.inf


@pytest.mark.slow
@pytest.mark.parametrize("kind, value, error", [("Q8_0", 29.480, 0.383), ("Q4_K_M", 29.819, 0.387)])
def test_llama_cpp_s_values(shared, kind, value, error):
    model = pyggml.load(shared / "models" / f"novel-30m-{kind}.gguf", compute="f32")
    text = (shared / "data" / "heldout-novels.txt").read_text()
    last = list(perplexity(model, text))[-1]
    assert last.n_chunks == 193
    assert last.value == pytest.approx(value, abs=0.1 * error)
    assert last.error == pytest.approx(error, rel=0.02)
