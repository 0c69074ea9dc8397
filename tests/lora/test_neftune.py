"""Noise on the embeddings (NEFTune): how much, where, and that it is repeatable."""

import numpy as np
import pytest

from runs import steps

NOISY = {"neftune_alpha": 5.0, "batch": 2, "grad_accum": 2, "seed": 3}


def ops_of(trainer):
    return {t.op.name for t in trainer.passes.training.graph.nodes if t.op is not None}


def test_without_it_no_graph_knows_of_it(trainer_of):
    assert "uniform_noise" not in ops_of(trainer_of())
    noisy = trainer_of(**NOISY)
    assert "uniform_noise" in ops_of(noisy)
    assert "uniform_noise" not in {t.op.name for t in noisy.passes.programs[1].schedule.graph.nodes}


def test_a_token_s_noise_follows_from_the_length_of_its_document(trainer_of):
    trainer = trainer_of(**NOISY)
    windows = trainer.corpus.train
    batch = next(windows.batches(np.array([2, 3]), 2))
    trainer.passes.train(batch)
    documents = np.concatenate([windows.documents[i][:-1] + 1000 * i for i in (2, 3)])
    lengths = np.array([np.sum(documents == d) for d in documents])
    assert len(set(lengths)) > 1
    found = trainer.passes._pairs[len(batch.tokens)].inputs.noise.data
    np.testing.assert_allclose(found, 5 / np.sqrt(lengths * 32), rtol=1e-6)


def test_it_changes_training_and_not_validation(trainer_of):
    reports = []
    for settings in (NOISY, NOISY | {"neftune_alpha": 0.0}):
        events = []
        trainer_of(**settings).run(events.append)
        reports.append(events)
    noisy, plain = reports
    assert noisy[0].loss == plain[0].loss  # the validation before the first step
    assert steps(noisy)[0].loss != steps(plain)[0].loss
    assert steps(noisy)[0].loss == pytest.approx(steps(plain)[0].loss, rel=0.1)
