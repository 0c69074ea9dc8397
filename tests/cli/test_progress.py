"""What is said while a run goes on: means, speed, time left."""

import re
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from pyggml.cli.terminal import progress
from pyggml.cli.terminal.progress import Lines, Meter, display, words_that_fit
from pyggml.lora import CheckpointReport, History, StepReport, ValidationReport
from pyggml.lora.objectives import Rewards, TokensRight


def step(number, loss=1.0, seconds=2.0, n_steps=100, n_tokens=64, accuracy=None):
    tally = None if accuracy is None else TokensRight(round(accuracy * n_tokens), n_tokens)
    return StepReport(number, n_steps, 0, loss, 1e-3, 0.5, n_tokens, seconds, tally)


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


def test_on_a_device_two_steps_tell_nothing_of_the_length(clock):
    meter = Meter(n_first=2)
    for number, now in ((1, 9.0), (2, 12.0), (3, 12.5)):
        clock.append(now)
        meter.add(step(number, seconds=now))
        assert meter.estimate() == ("0.5 s a step, 48 s left" if number == 3 else None)


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


def test_accuracy_is_that_of_the_last_steps_tokens(clock, capsys):
    meter = Meter()
    shown = Lines(meter)
    for report in (step(1, accuracy=0.5, n_tokens=30), step(2, accuracy=0.1, n_tokens=10)):
        meter.add(report)
        assert meter.tally.accuracy == pytest.approx(report.token_accuracy)
        shown(report)
    meter.add(step(3, accuracy=0.5, n_tokens=30))
    assert meter.tally.accuracy == pytest.approx(16 / 40), (
        "the first step's is left out, as its time"
    )
    shown(ValidationReport(3, 2.0, 64, TokensRight(16, 64)))
    said = capsys.readouterr().out
    assert "loss 1.0000  accuracy 50.0 %  lr" in said
    assert "validation loss 2.0000  accuracy 25.0 %" in said


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
    assert history(range(1, 61)).ends() == (pytest.approx(10.5), pytest.approx(50.5))
    assert history(range(1, 6)).ends() == (1.5, 4.5)


def history(losses, validations=()):
    return History(array("d", losses), [ValidationReport(*v) for v in validations])


RISES = [
    ([2.0] * 30 + [4.2] * 20, True),
    ([2.0] * 30 + [3.9] * 20, False),
    ([2.0] * 5 + [4.2] * 5, True),
    ([2.0] * 4 + [9.0] * 4, False),  # too few to tell from noise
]


@pytest.mark.parametrize("losses, has_doubled", RISES)
def test_a_loss_that_doubles_is_told_once(clock, losses, has_doubled):
    meter = Meter(history(losses))
    assert (meter.warning() is not None) == has_doubled
    assert meter.warning() is None
    if has_doubled:
        said = Meter(meter.history).warning()
        assert said == "the loss more than doubled, 2.000 → 4.200: --lr may be too high"


def test_a_history_survives_a_file():
    told = history([3.0, 1 / 3], [(0, 2.5, 640), (2, 1 / 7, 640)])
    assert History.of(told.arrays()) == told
    assert History.of(history([]).arrays()) == history([])


def test_the_bar_s_validation_is_the_newest(clock, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    meter = Meter(history([]))
    with display(meter, 400, 0) as shown:
        for event in (ValidationReport(0, 2.5, 640), step(1), ValidationReport(1, 1.5, 640)):
            meter.history.validations += [event] if isinstance(event, ValidationReport) else []
            meter.add(event)
            shown(event)
    assert "validation 1.500" in capsys.readouterr().out.split("━")[-1]


# -- narrow terminals ---------------------------------------------------------------------------

PARTS = [(0, "loss 2.345"), (2, "validation 2.456"), (3, "1,234 tokens/s"), (1, "2 h 5 min left")]
ROOMS = [
    (80, "loss 2.345  validation 2.456  1,234 tokens/s  2 h 5 min left"),
    (50, "loss 2.345  validation 2.456  2 h 5 min left"),
    (30, "loss 2.345  2 h 5 min left"),
    (12, "loss 2.345"),
    (5, "loss 2.345"),  # which the terminal cuts
]


@pytest.mark.parametrize("room, shown", ROOMS)
def test_what_matters_less_gives_way(room, shown):
    assert words_that_fit(PARTS, room) == shown


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_step_count_and_bar_stay_at_every_width(clock, capsys, monkeypatch, width):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    meter = Meter(history([]))
    with display(meter, 400, 0) as shown:
        for number in range(1, 13):
            clock.append(clock[-1] + 3.0)
            report = step(number, n_steps=400)
            meter.add(report)
            shown(report)
        for event in (ValidationReport(12, 1.5, 640), CheckpointReport(12, Path("points/step-12"))):
            meter.history.validations += [event] if isinstance(event, ValidationReport) else []
            shown(event)
        report = step(13, n_steps=400)
        meter.add(report)
        shown(report)
    lines = [
        re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
        for text in re.split(r"[\r\n]+", capsys.readouterr().out)
    ]
    bars = [line for line in lines if line.startswith("step ") and "━" in line]
    assert bars and all(re.match(r"step +\d+/400 [━╸╺ ]{5}", bar) for bar in bars)
    assert max(map(len, lines)) <= width
    assert "loss 1.000" in bars[-1] and bars[-1].startswith("step  13/400")
    assert ("left" in bars[-1]) == (width >= 60) and ("tokens/s" in bars[-1]) == (width > 80)
    assert ("lr 1.0e-03  |g| 0.5" in bars[-1]) == (width >= 80)
    above = lines[: lines.index(bars[-1])]
    assert any(line.startswith("step 12    validation loss 1.5000") for line in above)
    assert any(line.startswith("step 12    checkpoint points/step-12") for line in above)


@pytest.mark.parametrize("width", [80, 120])
def test_the_rate_has_room_beside_the_rewards(clock, capsys, monkeypatch, width):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    meter = Meter(history([]))
    with display(meter, 400, 0) as shown:
        for number in range(1, 4):
            clock.append(clock[-1] + 3.0)
            tally = Rewards(3.0, -6.0, 10, 10, 7, 10)
            report = replace(step(number, n_steps=400), tally=tally)
            meter.add(report)
            shown(report)
    bar = capsys.readouterr().out.split("━")[-1]
    assert re.search(r"70 % right  lr 1.0e-03.* 19 min 51 s left", bar)
    assert ("chosen +0.300  rejected -0.600  70 % right" in bar) == (width == 120)


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


def test_a_run_s_share_of_the_machine_is_said_beside_its_speed(clock, capsys):
    """From the second step on: tokens that are computed, not those that are learned alone."""
    meter = Meter(least=lambda anew: 0.005)
    show = Lines(meter)
    for number in (1, 2, 3):
        clock.append(20.0 * number)
        report = replace(step(number, n_tokens=10), n_computed=200)
        meter.add(report)
        show(report)
    first, second, *_ = [x for x in capsys.readouterr().out.splitlines() if x.startswith("step ")]
    assert "of this machine" not in first
    assert "  5 tokens/s, 50 % of this machine, " in second


def test_a_step_beyond_the_limit_has_it_measured_once_more(clock):
    asked = []

    def least(anew):
        asked.append(anew)
        return 0.2 if not anew else 0.05

    meter, shares = Meter(least=least), []
    for number in (1, 2, 3):
        clock.append(20.0 * number)
        meter.add(replace(step(number), n_computed=200, seconds=20.0))
        shares.append(meter.share)
    assert shares == ["", "50 % of this machine", "50 % of this machine"]
    assert asked == [False, True]


def test_without_a_limit_there_is_no_share(clock):
    meter = Meter()
    for number in (1, 2):
        meter.add(replace(step(number), n_computed=200))
    assert meter.share == ""
