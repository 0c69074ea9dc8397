"""The learning rate, step by step."""

from math import cos, pi

import pytest

from pyggml.lora import TrainConfig
from pyggml.lora.trainer.learning_rate import LearningRate

FRACTIONS = [
    ("cosine", lambda t: (1 + cos(pi * t)) / 2),
    ("linear", lambda t: 1 - t),
    ("constant", lambda t: 1.0),
    ("cosine_restarts", lambda t: (1 + cos(pi * (2 * t % 1))) / 2),
    ("wsd", lambda t: 1.0 if t <= 0.75 else (1 - t) / 0.25),
]


@pytest.mark.parametrize("name, shape", FRACTIONS)
def test_rises_linearly_then_falls_in_its_shape(name, shape):
    more = {"wsd": {"lr_decay": 0.25}}.get(name, {})
    more |= {} if name == "constant" else {"lr_min": 0.1}
    config = TrainConfig(lr=0.5, warmup_steps=4, lr_scheduler=name, **more)
    found = [LearningRate(config, 12)(step) for step in range(12)]
    rising = [0.125, 0.25, 0.375, 0.5]
    falling = [0.1 + 0.4 * shape(i / 8) for i in range(8)]
    assert found == pytest.approx(rising + falling, rel=1e-12)


def test_the_warm_up_takes_at_most_half_of_a_short_run():
    schedule = LearningRate(TrainConfig(lr=1.0, warmup_steps=100), 5)
    assert [schedule(i) for i in range(3)] == [0.5, 1.0, 1.0]


def test_one_step_without_warm_up_takes_the_highest_rate():
    assert LearningRate(TrainConfig(lr=1.0, warmup_steps=0), 1)(0) == 1.0


def test_cosines_start_anew_at_the_highest_rate():
    config = TrainConfig(lr=1.0, warmup_steps=0, lr_scheduler="cosine_restarts", lr_cycles=3)
    found = [LearningRate(config, 12)(step) for step in range(12)]
    once = [(1 + cos(pi * i / 4)) / 2 for i in range(4)]
    assert found == pytest.approx(once * 3, rel=1e-12)


def test_the_warm_up_may_be_a_share_of_all_steps():
    config = TrainConfig(lr=1.0, warmup_ratio=0.25, lr_scheduler="constant")
    assert [LearningRate(config, 16)(i) for i in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("name", [name for name, _ in FRACTIONS if name != "constant"])
def test_the_end_has_the_lowest_rate(name):
    """A run that is resumed with fewer steps may stand there."""
    config = TrainConfig(lr=1.0, lr_min=0.25, warmup_steps=0, lr_scheduler=name)
    assert LearningRate(config, 8)(8) == pytest.approx(0.25)
