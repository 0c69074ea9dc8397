"""What validates best is kept, and a run that gets no better ends."""

import numpy as np
import pytest

from pyggml.errors import ConfigError
from pyggml.lora import ValidationReport
from pyggml.lora.trainer.reports import History

from runs import state

# A rate at which the adapter soon learns its text by heart: validation falls, then rises.
SETTINGS = {"lr": 0.02, "lr_scheduler": "constant", "warmup_steps": 0, "epochs": 4, "val_every": 2}


@pytest.fixture
def whole(trainer_of):
    trainer = trainer_of(**SETTINGS, keep_best=True)
    assert trainer.run()
    return trainer


def test_the_parameters_become_those_that_validated_best(trainer_of, whole):
    best = whole.history.best
    assert 0 < best.step < whole.n_steps
    assert best.loss == min(v.loss for v in whole.history.validations)
    until = trainer_of(**SETTINGS, max_steps=best.step)
    until.run()
    assert np.array_equal(whole.parameters.data, until.parameters.data)
    last = trainer_of(**SETTINGS)
    last.run()
    assert not np.array_equal(whole.parameters.data, last.parameters.data)


@pytest.mark.parametrize("after_best", [False, True])
def test_the_best_is_kept_through_a_checkpoint(trainer_of, whole, tmp_path, after_best):
    step = whole.history.best.step + (2 if after_best else -2)
    first = trainer_of(**SETTINGS, keep_best=True, checkpoint_dir=str(tmp_path))
    first.run(lambda event: first.stop() if first.progress.step == step else None)
    second = trainer_of(**SETTINGS, keep_best=True)
    second.resume(tmp_path / f"step-{step:08d}.gguf")
    assert second.run()
    assert state(second) == state(whole)


def test_a_run_that_was_stopped_has_the_best_and_goes_on_from_its_last(trainer_of, whole):
    best = whole.history.best.step
    trainer = trainer_of(**SETTINGS, keep_best=True)

    def stop(event):
        if trainer.progress.step == best + 3:
            trainer.stop()

    assert not trainer.run(stop)
    assert (trainer.output_step, trainer.progress.step) == (best, best + 3)
    assert np.array_equal(trainer.parameters.data, whole.parameters.data)
    assert trainer.run() and trainer.output_step == best
    assert state(trainer) == state(whole)


def test_a_run_that_gets_no_better_ends(trainer_of, whole):
    losses = [v.loss for v in whole.history.validations]
    worse = [i for i in range(2, len(losses)) if min(losses[i - 1 : i + 1]) >= min(losses[: i - 1])]
    trainer = trainer_of(**SETTINGS, patience=2)
    assert trainer.run() and trainer.is_done
    assert trainer.progress.step == whole.history.validations[worse[0]].step < trainer.n_steps


def test_patience_counts_from_the_first_of_equal_losses():
    history = History(validations=[ValidationReport(i, x, 1) for i, x in enumerate([3, 2, 2, 2])])
    assert history.best.step == 1
    assert history.has_stalled(2) and not history.has_stalled(3) and not history.has_stalled(0)


def test_without_held_out_text_there_is_no_best(trainer_of, corpus_of):
    with pytest.raises(ConfigError, match="patience wants text that is held out.*keep_best wants"):
        trainer_of(corpus=corpus_of(10, n_held_out=0), patience=1, keep_best=True)
