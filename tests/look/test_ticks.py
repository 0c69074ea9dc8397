"""Ticks are round, few, within the axis, and in one format."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyggml.look.draw.scale import Scale
from pyggml.look.draw.ticks import linear_labels, linear_ticks, log_labels, log_ticks


@pytest.mark.quick
@pytest.mark.parametrize(
    "high, wanted",
    [
        (42.43, ["0", "10", "20", "30", "40"]),
        (1044, ["0", "200", "400", "600", "800", "1,000"]),
        (1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"][:6]),
        (0.0013, ["0.0000", "0.0005", "0.0010"]),
        (6, ["0", "2", "4", "6"]),
        (0, ["0"]),
    ],
)
def test_linear_ticks_in_one_format(high, wanted):
    assert linear_labels(linear_ticks(high)) == wanted


@given(st.floats(1e-9, 1e15), st.integers(3, 12))
def test_linear_ticks_are_round_few_and_inside(high, most):
    ticks = linear_ticks(high, most)
    assert ticks[0] == 0 and 2 <= len(ticks) <= most and ticks[-1] <= high * (1 + 1e-9)
    step = ticks[1]
    assert f"{step:.0e}"[0] in "125" and step == pytest.approx(float(f"{step:.0e}"))
    assert high - ticks[-1] < step


@pytest.mark.parametrize(
    "low, high, wanted",
    [
        (-3.96, 0.28, ["0.001", "0.01", "0.1", "1"]),
        (-7, -4, ["1e-7", "1e-6", "1e-5", "1e-4"]),
        (0.1, 0.9, ["2", "5"]),
        (-0.4, 0.4, ["0.5", "1", "2"]),
        (-9, 9, ["1e-9", "1e-5", "1e-1", "1e3", "1e7"]),
    ],
)
def test_logarithmic_ticks_in_one_format(low, high, wanted):
    assert log_labels(log_ticks(low, high)) == wanted


@given(st.floats(-12, 12), st.floats(0, 12))
def test_logarithmic_ticks_are_inside(low, width):
    ticks = log_ticks(low, low + width)
    assert all(10 ** (low - 1e-6) <= x <= 10 ** (low + width + 1e-6) for x in ticks)
    assert len(ticks) <= 6 and (ticks or width < 0.5)


def test_the_scale_of_colours_has_round_numbers_where_they_belong():
    wide = Scale(-4, 0.25, is_log=True)
    assert [label for _, label in wide.ticks()] == ["0.0001", "0.001", "0.01", "0.1", "1"]
    assert [part for part, _ in wide.ticks()] == pytest.approx([i / 4.25 for i in range(5)])
    assert wide.at(wide.ticks()[3][0]) == pytest.approx(0.1)
    shares = Scale(0, 1, is_log=False).ticks()
    assert [label for _, label in shares] == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    narrow = Scale(0.4, 0.5, is_log=True)
    assert [label for _, label in narrow.ticks()] == ["2.51", "3.16"]
    assert Scale(0.4, 0.4, is_log=True).ticks() == [(0.0, "2.51")]
