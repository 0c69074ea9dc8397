"""The arithmetic of the simulation of many ranks: `benchmarks/many_ranks.py`."""

import json
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def many(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import many_ranks

    return many_ranks


def test_a_step_ends_with_its_slowest_rank(many):
    even = np.array([2.0])
    assert (many.steps(even, 6, 1, 0.5) == 12.5).all() and (
        many.steps(even, 6, 3, 0.5) == 4.5
    ).all()
    assert (many.steps(even, 5, 2, 0.0) == 6.0).all(), "one rank has three passes"
    two = np.array([1.0, 3.0])
    assert many.steps(two, 64, 64, 0.0).mean() == pytest.approx(3.0)
    assert many.steps(two, 2, 2, 0.0).mean() == pytest.approx(2.5, abs=0.1)
    assert many.steps(two, 2, 2, 0.0, share_cores=True).mean() == pytest.approx(2.0, abs=0.1)


def test_an_exchange_is_what_a_rank_sends(many):
    """As docs/scale.md has it: 4 · N · (k + 1) · (R - 1) / R bytes."""
    assert many.sent_bytes(4, 4e6, 2) == 9e6
    link = many.Link(message=1e-3, bandwidth=1e9)
    assert link.seconds(1, 4e6, 2) == 0.0
    assert link.seconds(4, 4e6, 2) == pytest.approx(0.009 + (2 * many.SMALL * 2 + 2 * 3) * 1e-3)
    assert link.seconds(1000, 4e6, 1) > link.seconds(8, 4e6, 1)


def test_failures_cost_what_was_not_saved_and_the_way_back(many):
    """To first order: the saves, half of an interval for each failure, and restart and wait."""
    failing = many.Failures(1e6, silent=0.25, limit=400.0, restart=100.0, save=2.0)
    rate, every = 10 / 1e6, 50
    wanted = 1 - 2.0 / (every * 4.0) - rate * (every * 4.0 / 2 + 100.0 + 0.25 * 400.0)
    assert failing.goodput(4.0, 10, every, n=100_000) == pytest.approx(wanted, abs=5e-4)
    best = failing.interval(10)
    assert best == pytest.approx((2 * 2.0 * 1e6 / 10) ** 0.5)
    steps = [round(best * factor / 4.0) for factor in (0.25, 1.0, 4.0)]
    few, good, many_steps = (failing.goodput(4.0, 10, n, n=100_000) for n in steps)
    assert few < good > many_steps


def test_it_tells_of_hosts(many, capsys):
    many.main(["--pass-seconds", "2", "--gradient-mb", "800", "--hosts", "1,8", "--gbits", "100"])
    one, eight = map(json.loads, capsys.readouterr().out.splitlines())
    assert one["exchange"] == 0 and eight["exchange"] == pytest.approx(
        0.8 * 2 * 7 / 8 / 12.5, rel=0.1
    )
    assert 2 < one["step"] < eight["step"] and eight["goodput"] < one["goodput"] < 1


def test_rounds_in_which_others_compute_do_not_count(many, capsys, monkeypatch):
    shares = iter((0.3, 0.01, 0.5))

    def measured(_given, _n):
        share = next(shares)
        parts = {"passes": [0.5, 0.5], "rest": [0.1], "small": [0.0], "sum": [0.2]}
        return parts | {"step": [1.6 if share > 0.03 else 0.8]}, share

    monkeypatch.setattr(many, "measured_parts", measured)
    words = ["model.gguf", "--passes", "2", "--ranks", "2"]
    many.main([*words, "--rounds", "2"])
    line = json.loads(capsys.readouterr().out)
    assert line["off"] == "+0.0%" and line["others"] == [0.3, 0.01]
    with pytest.raises(SystemExit, match="others took 50% of the processors"):
        many.main(words)
