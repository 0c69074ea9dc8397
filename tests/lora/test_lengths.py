"""Rows that share no window: padded no further than they reach, with the same numbers."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

import pyggml
from pyggml.lora import LoraConfig, TrainConfig, Trainer, ValidationReport, attach
from pyggml.lora.data import Corpus
from pyggml.lora.data.tokens.documents import Document
from pyggml.lora.data.windows.lengths import N_LENGTHS, bucket, few_lengths
from pyggml.lora.data.windows.packing import pack

from runs import steps

CTX = 32


def documents(n, seed=0):
    """Rows of 2 to 33 tokens, mostly short, of which the first few are only read."""
    rng = np.random.default_rng(seed)
    sizes = np.minimum(rng.geometric(0.12, n) + 1, CTX + 1)
    return [
        Document(rng.integers(0, 48, m).tolist(), np.arange(m) >= rng.integers(0, m)) for m in sizes
    ]


def corpus(n=23, n_held_out=6, **changes):
    parts = [pack(d, CTX, True, alone=True) for d in (documents(n), documents(n_held_out, 1))]
    return Corpus(*(dataclasses.replace(part, **changes) for part in bucket(parts)))


@pytest.fixture
def run_of(tiny):
    """(corpus, **settings) -> a trainer that has run, and its reports."""

    def make(data, **settings):
        model = pyggml.load(tiny, compute="f32")
        adapter = attach(model, LoraConfig(rank=3, alpha=5.0))
        for pair in adapter.pairs.values():
            pair.b.data[:] = np.random.default_rng(1).normal(0, 0.1, pair.b.shape)
        config = TrainConfig(**{"compute": "f32", "lr": 0.01, "warmup_steps": 0} | settings)
        trainer, events = Trainer(adapter.model, adapter.parameters, data, config), []
        trainer.run(events.append)
        return trainer, events

    return make


def test_lengths_are_few_and_leave_the_least_padding():
    filled = np.array([3] * 10 + [9] * 10 + [10, 17, 20, 31] * 2)
    assert few_lengths(filled, CTX).tolist() == [3, 10, 20, 31]
    assert few_lengths(np.array([7, 7]), CTX).tolist() == [7]
    assert few_lengths(np.array([100, 1000]), 1024).tolist() == [128, 1024], "multiples of 32"


def test_a_window_is_computed_up_to_its_last_target():
    data = corpus().train
    assert 1 < len(np.unique(data.lengths)) <= N_LENGTHS
    for targets, length in zip(data.targets(), data.lengths, strict=True):
        last = np.flatnonzero(targets).max()
        assert last < length
    (batch,) = data.batches([int(data.lengths.argmin())], 2)
    assert len(batch.tokens) == 2 * data.lengths.min()
    few = [0, 2, 3]
    assert data.n_computed(few) == sum(data.lengths[i] for i in few)
    assert data.n_computed() == data.lengths.sum()


def test_the_windows_of_a_step_are_about_as_long_as_each_other():
    data = corpus(101).train
    order = data.order(7, 3, step=4)
    alone = data.order(7, 3)  # steps of one window, in any order
    assert sorted(alone) == list(range(len(data))) and (np.diff(data.lengths[alone]) < 0).any()
    assert sorted(order) == list(range(len(data))) and (order == data.order(7, 3, step=4)).all()
    assert any((order != data.order(*other, step=4)).any() for other in ((7, 4), (8, 3)))
    lengths = data.lengths[order[: len(order) // 4 * 4]].reshape(-1, 4)
    mixed = np.count_nonzero(np.ptp(lengths, axis=1))
    assert mixed < N_LENGTHS, "only where one length ends"
    firsts = lengths[:, 0]
    assert (np.diff(firsts) < 0).any() and (np.diff(firsts) > 0).any(), "steps are shuffled"


def test_weights_of_files_hold():
    data = corpus(40).train
    data = dataclasses.replace(data, repeats=np.where(np.arange(len(data)) < 10, 2.0, 1.0))
    read = Counter(data.order(0, 0, step=3).tolist())
    assert [read[i] for i in range(len(data))] == [2] * 10 + [1] * (len(data) - 10)


def test_losses_and_gradients_are_those_of_whole_windows(run_of):
    """The same windows in the same steps, of which one run computes the padding too."""
    order = corpus().train.order(0, 0, 4)
    found = []
    for changes in ({}, {"lengths": None}):
        data = corpus(**changes)
        data = dataclasses.replace(data, train=data.train.part(order[:4]))
        trainer, events = run_of(data, batch=2, grad_accum=2, clip=0.0)
        held_out = [e for e in events if isinstance(e, ValidationReport)]
        found.append((steps(events), held_out, trainer.parameters.gradient.copy()))
    (short, held_out, gradient), (whole, held_out_whole, wanted) = found
    for one, other in zip(short + held_out, whole + held_out_whole, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.token_accuracy == other.token_accuracy
    np.testing.assert_allclose(gradient, wanted, rtol=1e-3, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("n", [23, 21])  # of which the last step has three, or one
@pytest.mark.parametrize("batch", [1, 2])
def test_accumulation_equals_the_large_batch(batch, n, run_of):
    found = []
    for size in (4, batch):
        trainer, events = run_of(corpus(n), batch=size, grad_accum=4 // size, weight_decay=0.1)
        p = trainer.parameters
        found.append(([e.loss for e in steps(events)], p.data.copy(), p.gradient.copy()))
    (losses, data, wanted), (others, again, gradient) = found
    assert len(losses) == 6, "the last step has what is left"
    np.testing.assert_allclose(losses, others, rtol=1e-4)
    np.testing.assert_allclose(data, again, atol=2e-3)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-2, atol=1e-3 * np.abs(wanted).max())


def test_a_validation_is_that_of_packed_windows(run_of):
    short, packed = corpus(), pack(documents(6, 1), CTX, whole=True)
    losses = []
    for held_out in (short.validation, packed):
        _, events = run_of(dataclasses.replace(short, validation=held_out), batch=2, max_steps=1)
        losses.append(next(e.loss for e in events if isinstance(e, ValidationReport)))
    assert len(packed) < len(short.validation)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_all_lengths_share_the_memory_of_the_longest(run_of):
    trainer, _ = run_of(corpus(), max_steps=1)
    alone, _ = run_of(corpus(lengths=None), max_steps=1)
    n = len(trainer.corpus.lengths)
    assert n > 1 and len(trainer.passes.programs) == 2 * n
    assert trainer.passes.n_bytes == alone.passes.n_bytes
