"""Short and long rotary factors: a document's loss is that of it alone, whatever is beside it."""

import numpy as np
import pytest
from tiny_models import scaled, write

import pyggml
from pyggml.lora import loss_and_grads, perplexity
from pyggml.lora.evaluate.passes import Continuation, log_probs

ORIGINAL, CTX = 8, 24
LENGTHS = [5, 9, 10, 14, 3, 8, 20, 9, 10, 6]  # of 9 tokens 8 are read, so that these are short
FACTORS = {"short": (1.0, 3.0), "long": (2.0, 0.5)}


@pytest.fixture(scope="module")
def phi3(tmp_path_factory):
    """Path of a phi3 whose sequences of more than ORIGINAL tokens are long."""
    tensors = {f"rope_factors_{k}.weight": np.array(f, np.float32) for k, f in FACTORS.items()}
    keys = {"phi3.rope.scaling.original_context_length": ORIGINAL}
    path = tmp_path_factory.mktemp("phi3") / "phi3.gguf"
    return write(path, "phi3", keys=keys, tensors=tensors, n_vocab=48, numbers=scaled)


@pytest.fixture
def long_trainer(trainer_of, corpus_of, phi3):
    corpus = corpus_of(CTX, LENGTHS, n_held_out=4)
    load = {"compute": "f32"}
    return trainer_of(path=phi3, corpus=corpus, load=load, ctx=CTX, batch=2, clip=0.0, max_steps=1)


def documents(batch):
    """The parts of documents that a batch predicts: their tokens, the target of the last too."""
    for start in np.unique(batch.span[batch.weights > 0, 0]):
        inside = np.flatnonzero((batch.span[:, 0] == start) & (batch.weights > 0))
        yield [*batch.tokens[inside].tolist(), int(batch.targets[inside[-1]])]


def alone(model, batch):
    """The mean loss over a batch's targets, each document by itself; their gradients."""
    total, sums, n = 0.0, {}, np.count_nonzero(batch.weights)
    for ids in documents(batch):
        loss, grads = loss_and_grads(model, ids)
        share = (len(ids) - 1) / n
        total += share * loss
        sums = {name: sums.get(name, 0) + share * g for name, g in grads.items()}
    return total, sums


def test_a_step_is_that_of_each_document_alone(long_trainer):
    trainer = long_trainer
    batch = next(trainer.corpus.train.batches([0, 1], 2))
    lengths = {len(ids) - 1 for ids in documents(batch)}
    assert {ORIGINAL, ORIGINAL + 1} <= lengths, "one at the bound, one beyond it"
    loss, grads = alone(trainer.model, batch)
    assert trainer.passes.evaluate(batch) == pytest.approx(loss, rel=1e-6)
    for gradient in trainer.parameters.gradients.values():
        gradient.data[:] = 0
    assert trainer.passes.train(batch) == pytest.approx(loss, rel=1e-6)
    for name, g in trainer.parameters.gradients.items():
        np.testing.assert_allclose(g.data, grads[name], rtol=1e-3, atol=1e-6, err_msg=name)


def test_scores_of_windows_are_those_of_each_document_alone(long_trainer):
    model, data = long_trainer.model, long_trainer.corpus.train
    losses = np.concatenate([part.scores.losses for part in perplexity(model, data, CTX)])
    wanted = [alone(model, batch)[0] for batch in data.batches(range(len(data)), 1)]
    counts = [data.n_targets([i]) for i in range(len(data))]
    assert losses.mean() == pytest.approx(np.average(wanted, weights=counts), rel=1e-6)


def test_what_begins_alike_is_shared_among_sequences_of_the_same_factors(phi3):
    model = pyggml.load(phi3, compute="f32")
    ids = tuple(np.random.default_rng(1).integers(0, 48, 20).tolist())
    asked = [Continuation(ids[:n], 1) for n in (20, 9, 10, 6)]
    asked += [Continuation((*ids[:8], 5, 7, 9, 2), 8), Continuation((*ids[:8], 4), 8)]
    for one, found in zip(asked, log_probs(model, asked), strict=True):
        logits = model.logits(one.ids[:-1]).astype(np.float64)
        at, targets = np.arange(one.first - 1, len(one.ids) - 1), np.array(one.ids[one.first :])
        wanted = logits[at, targets] - np.log(np.exp(logits[at]).sum(axis=1))
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5)
