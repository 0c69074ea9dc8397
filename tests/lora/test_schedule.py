"""The learning rate, step by step."""

from math import cos, pi

import pytest

from pyggml.lora import TrainConfig
from pyggml.lora.schedule import Schedule

FRACTIONS = [
    ("cosine", lambda t: (1 + cos(pi * t)) / 2),
    ("linear", lambda t: 1 - t),
    ("constant", lambda t: 1.0),
]


@pytest.mark.parametrize("name, shape", FRACTIONS)
def test_rises_linearly_then_falls_in_its_shape(name, shape):
    config = TrainConfig(lr=0.5, lr_min=0.1, warmup_steps=4, lr_scheduler=name)
    found = [Schedule(config, 12)(step) for step in range(12)]
    rising = [0.125, 0.25, 0.375, 0.5]
    falling = [0.1 + 0.4 * shape(i / 8) for i in range(8)]
    assert found == pytest.approx(rising + falling, rel=1e-12)


def test_the_warm_up_takes_at_most_half_of_a_short_run():
    schedule = Schedule(TrainConfig(lr=1.0, warmup_steps=100), 5)
    assert [schedule(i) for i in range(3)] == [0.5, 1.0, 1.0]


def test_one_step_without_warm_up_takes_the_highest_rate():
    assert Schedule(TrainConfig(lr=1.0, warmup_steps=0), 1)(0) == 1.0
