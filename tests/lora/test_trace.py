"""What a trainer's batches computed, read while it trains."""

import numpy as np
import pytest

from pyggml import At
from pyggml.errors import PyggmlError, ShapeError
from pyggml.generation import Session
from pyggml.lora import loss_and_grads

from runs import steps


def run(trainer):
    """The loss of each step."""
    events = []
    trainer.run(events.append)
    return [report.loss for report in steps(events)]


@pytest.mark.parametrize("grad_checkpointing", [False, True])
def test_reading_changes_no_bit_of_the_training(trainer_of, grad_checkpointing):
    settings = {"grad_checkpointing": grad_checkpointing, "max_steps": 3}
    plain, traced = trainer_of(**settings), trainer_of(**settings)
    losses = run(plain)
    with traced.model.trace("blk.*.out", "blk.1.attn_q") as t:
        assert run(traced) == losses
    np.testing.assert_array_equal(traced.parameters.data, plain.parameters.data)
    assert t.names == ["blk.0.out", "blk.1.attn_q", "blk.1.out", "blk.2.out"]
    n_windows = traced.config.windows_per_step * 3
    n_batches = n_windows // traced.config.batch
    assert len(t.runs("blk.1.out")) == len(t.grads("blk.1.out")) == n_batches
    assert len(t.runs("blk.1.out", validation=True)) == 4, "two batches, twice"
    assert t["blk.1.out"].shape == t.grad("blk.1.out").shape


def test_gradients_of_a_batch_are_those_of_its_sequence(trainer_of, corpus_of):
    """One document of one window: the batch is a sequence, and B is 0 in the first step."""
    trainer = trainer_of(corpus=corpus_of(10, lengths=[11], n_held_out=0), max_steps=1, batch=1)
    ids = trainer.corpus.train.tokens[0]
    with trainer.model.trace("blk.1.out") as alone:
        loss_and_grads(trainer.model, ids, parameters={})
    with trainer.model.trace("blk.1.out") as t:
        run(trainer)
    np.testing.assert_allclose(t.grad("blk.1.out"), alone.grad("blk.1.out"), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(t.runs("blk.1.out")[0], alone["blk.1.out"], rtol=1e-3, atol=1e-3)


def test_a_steered_model_trains_against_the_steering(trainer_of):
    """A change of the activations is part of what is trained and validated."""
    plain, steered = trainer_of(max_steps=1), trainer_of(max_steps=1)
    with steered.model.trace(add={"blk.0.out": 0.5}):
        (changed,) = run(steered)
    (loss,) = run(plain)
    assert abs(changed - loss) > 1e-3


def test_the_gradients_of_every_batch_are_kept(trainer_of):
    """Those of the first batch are still there after the second."""
    trainer = trainer_of(max_steps=2)
    with trainer.model.trace("blk.1.out") as t:
        run(trainer)
    again = trainer_of(max_steps=1)
    with again.model.trace("blk.1.out") as first:
        run(again)
    np.testing.assert_array_equal(t.grads("blk.1.out")[0], first.grad("blk.1.out"))
    assert not np.array_equal(t.grads("blk.1.out")[0], t.grad("blk.1.out"))


def test_tokens_are_those_of_each_text_of_a_batch(trainer_of, corpus_of):
    """Two windows of one document each: in both the second and the last token change."""
    trainer = trainer_of(corpus=corpus_of(10, lengths=[11, 11], n_held_out=0), max_steps=1, batch=2)
    with trainer.model.trace("blk.0.out", replace={"blk.0.out": 7.0}, tokens=[1, -1]) as t:
        run(trainer)
    changed = np.flatnonzero((t["blk.0.out"] == 7).all(axis=1))
    np.testing.assert_array_equal(changed, [1, 9, 11, 19])


def test_a_trace_that_breaks_a_run_is_named(trainer_of):
    trainer = trainer_of(max_steps=1)
    with (
        trainer.model.trace(scale={"blk.0.out": 3e38}),
        pytest.raises(PyggmlError, match="what a trace makes of blk.0.out may lead to no numbers"),
    ):
        run(trainer)


def test_rows_are_the_windows_of_a_batch(trainer_of, corpus_of):
    """Three windows; the second one's first token, and all of the third."""
    corpus = corpus_of(10, lengths=[11, 11, 11], n_held_out=0)
    trainer = trainer_of(corpus=corpus, max_steps=1, batch=3)
    changes = {"blk.0.out": At(7.0, rows=[1], tokens=[0]), "blk.1.out": At(7.0, rows=[-1])}
    with trainer.model.trace("blk.*.out", replace=changes) as t:
        run(trainer)
    for name, rows in (("blk.0.out", [10]), ("blk.1.out", range(20, 30))):
        np.testing.assert_array_equal(np.flatnonzero((t[name] == 7).all(axis=1)), rows)


def test_a_session_is_the_only_row_of_its_batch(trainer_of):
    model = trainer_of().model
    logits = []
    for change in (At(2), At(2, rows=[0]), At(2, rows=[])):
        with model.trace(scale={"blk.0.out": change}):
            logits.append(Session(model, 20).feed([1, 2, 3]))
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=1e-5 * np.abs(logits[0]).max())
    assert np.abs(logits[2] - logits[0]).max() > 1e-2
    with (
        model.trace(scale={"blk.0.out": At(2, rows=[1])}),
        pytest.raises(ShapeError, match="blk.0.out: there is no row 1 in a batch of 1"),
    ):
        Session(model, 20).feed([1, 2, 3])


@pytest.mark.parametrize("batch", [1, 3])
def test_windows_are_changed_row_by_row(trainer_of, corpus_of, batch):
    """A function gets the activation of one window, and an array of its length is for each."""
    corpus = corpus_of(10, lengths=[11, 11, 11], n_held_out=0)
    trainer = trainer_of(corpus=corpus, max_steps=1, batch=batch)
    array = np.arange(10, dtype=np.float32)[:, None] * np.ones(32, np.float32)
    changes = {"blk.0.out": lambda x: 0 * x + array, "blk.1.out": array}
    with trainer.model.trace("blk.*.out", replace=changes) as t:
        run(trainer)
    for name in changes:
        np.testing.assert_array_equal(t[name], np.tile(array, (batch, 1)))
