"""The loop: what a step computes, what a run reports, and what it refuses."""

import dataclasses
from array import array
from time import perf_counter

import numpy as np
import pytest

import pyggml
from pyggml.errors import ConfigError, DataError, NoGradientError, PyggmlError
from pyggml.lora import (
    StepReport,
    TrainConfig,
    Trainer,
    ValidationReport,
    attach,
    loss_and_grads,
)
from pyggml.lora.data import Corpus
from pyggml.lora.trainer.reports import History

from runs import state, steps

# -- one step -----------------------------------------------------------------------------------


def test_validation_is_the_mean_loss_of_what_is_held_out(trainer_of, corpus_of):
    corpus = corpus_of(10, [30, 12, 21], n_held_out=1)
    exact = {"compute": "f32"}  # what a loss with gradients attends to may be rounded
    trainer = trainer_of(corpus=corpus, max_steps=1, load=exact)
    events = []
    trainer.run(events.append)
    first = next(e for e in events if isinstance(e, ValidationReport))
    model = trainer_of(load=exact).model
    total = n = 0
    held_out = corpus.validation
    for window, documents in zip(held_out.tokens, held_out.documents, strict=True):
        ids = window[documents >= 0]
        if len(ids) > 1:
            total += loss_and_grads(model, ids)[0] * (len(ids) - 1)
            n += len(ids) - 1
    assert first.step == 0 and first.n_tokens == n
    assert first.loss == pytest.approx(total / n, rel=1e-5)


# -- a run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("modules", [None, ("attn_q", "output")])
def test_accuracy_is_the_share_of_tokens_with_the_greatest_logit(modules, trainer_of, corpus_of):
    """Of a model that learned its text, with logits that are never formed and with whole ones."""
    corpus = dataclasses.replace(corpus_of(10), validation=corpus_of(10).train)
    settings = {"lr": 0.05, "epochs": 8, "batch": 2, "grad_accum": 2, "lr_scheduler": "constant"}
    trainer, events = trainer_of({"modules": modules}, corpus=corpus, **settings), []
    trainer.run(events.append)
    n_right = 0
    for batch in corpus.train.batches(range(len(corpus.train)), 1):
        for start in np.unique(batch.span[batch.weights > 0, 0]):
            inside = np.flatnonzero((batch.span[:, 0] == start) & (batch.weights > 0))
            logits = trainer.model.logits(batch.tokens[inside])
            n_right += int((logits.argmax(1) == batch.targets[inside]).sum())
    validations = [e for e in events if isinstance(e, ValidationReport)]
    wanted = n_right / corpus.train.n_targets()
    assert 0.2 < wanted < 1 and validations[-1].token_accuracy == pytest.approx(wanted, abs=0.02)
    assert validations[0].token_accuracy < 0.15
    assert all(0 <= e.token_accuracy <= 1 for e in steps(events))
    assert steps(events)[-1].token_accuracy > steps(events)[0].token_accuracy


@pytest.mark.quick
def test_the_loss_falls_and_the_reports_are_in_order(trainer_of):
    trainer = trainer_of(lr=0.03, epochs=8, batch=2, val_every=5, val_windows=1)
    reserved, events = trainer.reserve(), []
    assert reserved.arena > 0 and reserved.parameters == 4 * trainer.parameters.data.nbytes
    assert trainer.run(events.append)
    made = steps(events)
    assert [e.step for e in made] == list(range(1, trainer.n_steps + 1))
    assert {e.n_steps for e in made} == {trainer.n_steps}
    assert [e.epoch for e in made] == sorted(e.epoch for e in made) and made[-1].epoch == 7
    assert all(e.tokens_per_second > 0 for e in made)
    assert np.mean([e.loss for e in made[-6:]]) < 0.8 * np.mean([e.loss for e in made[:6]])
    validated = [e.step for e in events if isinstance(e, ValidationReport)]
    assert validated == sorted({*range(0, trainer.n_steps, 5), trainer.n_steps})


def test_parameters_of_another_model_are_refused(tiny, corpus_of):
    stranger = attach(pyggml.load(tiny)).parameters
    trainer = Trainer(pyggml.load(tiny), stranger, corpus_of(10), TrainConfig())
    with pytest.raises(NoGradientError, match="blk.0.attn_q.weight.lora_a does not reach the loss"):
        trainer.reserve()


def test_numbers_that_are_not_finite_stop_the_run_and_are_traced(trainer_of):
    trainer = trainer_of(max_steps=3)
    trainer.run(lambda e: trainer.stop() if isinstance(e, StepReport) else None)
    trainer.model.adapters[0]["blk.1.ffn_up.weight"].a.data[0, 0] = np.nan
    before = state(trainer)
    with pytest.raises(
        PyggmlError, match=r"^step 2: the loss is nan.*made by <.*mul_mat.*; lr may"
    ):
        trainer.run()
    assert state(trainer) == before


def test_settings_and_text_that_do_not_fit_the_model_are_refused(trainer_of, corpus_of):
    with pytest.raises(ConfigError, match="ctx is 100, wanted at most the model's 64; compute is"):
        trainer_of(ctx=100, compute="f32")
    other = dataclasses.replace(corpus_of(10), validation=corpus_of(9).validation)
    with pytest.raises(ConfigError, match="ctx is 10, but the windows held out have 9 tokens"):
        trainer_of(corpus=other)
    corpus = corpus_of(10)
    corpus.train.tokens[0, 0] = 48
    with pytest.raises(DataError, match="wanted 0 to 47"):
        trainer_of(corpus=corpus)


def test_a_validation_that_is_no_number_ends_the_run(trainer_of, tmp_path):
    """As after one step too far: the checkpoint before it stays the newest."""
    trainer = trainer_of(max_steps=4, val_every=2, checkpoint_dir=str(tmp_path), checkpoint_every=1)

    def broken(event):
        if isinstance(event, StepReport) and event.step == 2:
            trainer.parameters.data[:] = np.nan

    with pytest.raises(
        PyggmlError, match=r"^after step 2 the validation loss is nan; .*mul_mat>.*; lr may be too"
    ):
        trainer.run(broken)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001.gguf"]


def test_a_last_step_of_one_batch_adds_no_older_gradient(trainer_of, corpus_of):
    """Of 6 windows a step of two batches, then one of a single batch: as steps of one batch."""
    settings = {"batch": 2, "epochs": 1, "lr": 1e-30, "lr_scheduler": "constant", "warmup_steps": 0}
    corpus = Corpus(corpus_of(10).train.part(slice(6)), None)
    several, alone = (trainer_of(corpus=corpus, grad_accum=n, clip=0.0, **settings) for n in (2, 1))
    assert several.run() and alone.run() and several.parameters.gradient.any()
    wanted = alone.parameters.gradient
    np.testing.assert_allclose(several.parameters.gradient, wanted, rtol=1e-5, atol=1e-7)


def windows_read(trainer):
    """The windows of each step of a run."""
    read, windows = [], trainer._windows

    def look():
        read.append(windows())
        return read[-1]

    trainer._windows = look
    trainer.run()
    return read


def test_what_an_epoch_has_left_is_read_or_dropped(trainer_of, corpus_of):
    """Dropped, it is of other windows in each epoch; never all of an epoch."""
    corpus = Corpus(corpus_of(10).train.part(slice(7)), None)
    for drop, each in ((False, 3), (True, 2)):
        trainer = trainer_of(corpus=corpus, batch=3, epochs=2, drop_last=drop, max_steps=0)
        assert trainer.n_in_last_step == (3 if drop else 1)
        read = windows_read(trainer)
        assert len(read) == trainer.n_steps == 2 * each
        assert [len(windows) for windows in read[:each]] == ([3, 3] if drop else [3, 3, 1])
        first, second = (set(np.concatenate(read[i : i + each])) for i in (0, each))
        assert len(first) == len(second) == (6 if drop else 7)
        assert (first == second) == (not drop)
    assert trainer_of(corpus=corpus, batch=8, epochs=1, drop_last=True).n_steps == 1


def test_a_step_tells_its_seconds(trainer_of):
    events, began = [], perf_counter()
    trainer_of(max_steps=2).run(events.append)
    assert 0 < sum(e.seconds for e in steps(events)) < perf_counter() - began


def test_a_loss_has_doubled_once_ten_steps_show_it():
    for n, doubled in ((4, False), (9, False), (10, True)):
        history = History(losses=array("d", [1.0] * (n // 2) + [5.0] * (n - n // 2)))
        assert history.has_doubled is doubled
