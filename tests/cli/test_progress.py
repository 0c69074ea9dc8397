"""What is said while a run goes on: means, speed, time left."""

import re

import pytest

from pyggml.cli import progress
from pyggml.cli.progress import Lines, Meter
from pyggml.lora import StepReport, ValidationReport


def step(number, loss=1.0, seconds=2.0, n_steps=100):
    return StepReport(number, n_steps, 0, loss, 1e-3, 0.5, 64, seconds)


@pytest.fixture
def clock(monkeypatch):
    """A list whose last item is the time."""
    times = [0.0]
    monkeypatch.setattr(progress, "perf_counter", lambda: times[-1])
    return times


def test_a_first_step_that_may_have_compiled_counts_until_there_is_another(clock):
    meter = Meter()
    meter.add(step(1, seconds=20.0))
    assert (meter.tokens_per_second, meter.each, meter.left) == (3.2, None, "")
    for number in (2, 3):
        clock.append(2.0 * (number - 1))
        meter.add(step(number))
    assert (meter.tokens_per_second, meter.each, meter.left) == (32, 2, "3 min 14 s left")


def test_the_length_of_the_run_is_said_once_and_as_soon_as_it_is_known(clock):
    meter = Meter()
    meter.add(step(1))
    assert meter.estimate() is None
    clock.append(3.0)
    meter.add(step(2))
    assert meter.estimate() == "3.0 s a step, 4 min 54 s left"
    assert meter.estimate() is None
    slow = Meter()
    slow.add(step(1, seconds=300.0))
    assert slow.estimate() == "5 min 0 s a step, 8 h 15 min left"
    short = Meter()
    short.add(step(1, seconds=300.0, n_steps=1))
    assert short.estimate() is None


def test_validations_count_for_the_time_that_is_left(clock):
    meter = Meter()
    meter.add(step(1))
    meter.add(ValidationReport(1, 3.0, 64))
    clock.append(10.0)
    meter.add(step(2))
    assert meter.each == 10


def test_a_resumed_run_counts_its_own_steps(clock):
    meter = Meter()
    meter.add(step(51))
    clock.append(4.0)
    meter.add(step(52))
    assert (meter.each, meter.left) == (4, "3 min 12 s left")


def test_losses_are_means_of_the_last_steps_and_of_both_ends(clock):
    meter = Meter()
    for number in range(1, 61):
        meter.add(step(number, loss=float(number)))
    assert meter.loss == pytest.approx(50.5)  # of 41 … 60
    assert meter.ends() == (pytest.approx(10.5), pytest.approx(50.5))
    short = Meter()
    for number in range(1, 6):
        short.add(step(number, loss=float(number)))
    assert short.ends() == (1.5, 4.5)


def test_lines_come_every_ten_seconds_and_at_both_ends(clock, capsys):
    meter = Meter()
    lines = Lines(meter)
    for number in range(1, 31):
        clock.append(number * 2.0)
        report = step(number, n_steps=30)
        meter.add(report)
        lines(report)
    found = [int(n) for n in re.findall(r"step (\d+)/30", capsys.readouterr().out)]
    assert found == [1, 2, 7, 12, 17, 22, 27, 30]
