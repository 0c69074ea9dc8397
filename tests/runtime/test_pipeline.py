"""Passes whose parts lie on several devices: the order in which they are started."""

from collections import Counter

import pytest

from pyggml.runtime.pipeline import in_turns

THERE_AND_BACK = [("a", 1), ("b", 2), ("a", 1)]
OF_THREE = [("a", 1), ("b", 1), ("c", 2), ("b", 1), ("a", 1)]
IN_TURNS = [("a", 1), ("b", 1), ("a", 1), ("b", 2), ("a", 1), ("b", 1), ("a", 1)]
UNEVEN = [("a", 1), ("b", 2), ("c", 3), ("b", 2), ("a", 1)]
AHEAD = [("a", 1), ("b", 1)]


def times(parts, n_passes, n_slots):
    """When each part of each pass begins and ends, on devices that do one after the other."""
    free, ends = Counter(), {}
    for k, i in in_turns(parts, n_passes, n_slots):
        device, seconds = parts[i]
        before = [(k, i - 1)] if i else []
        before += [(k - n_slots, len(parts) - 1)] if i == 0 and k >= n_slots else []
        begin = max([free[device], *(ends[each][1] for each in before)])
        free[device] = begin + seconds
        ends[k, i] = begin, begin + seconds
    return ends


@pytest.mark.quick
@pytest.mark.parametrize(
    ("parts", "n_passes", "n_slots", "wanted"),
    [
        (THERE_AND_BACK, 4, 1, 16),
        (THERE_AND_BACK, 4, 2, 10),  # the first device waits for the last, once
        (THERE_AND_BACK, 1, 2, 4),
        (OF_THREE, 8, 3, 20),
        (IN_TURNS, 4, 4, 18),  # half the wait of two runs of blocks twice as long
        (UNEVEN, 4, 3, 19),
        (AHEAD, 8, 2, 9),
    ],
)
def test_no_device_waits_that_could_compute(parts, n_passes, n_slots, wanted):
    ends = times(parts, n_passes, n_slots)
    assert len(ends) == n_passes * len(parts)
    assert max(end for _, end in ends.values()) == wanted


@pytest.mark.parametrize("parts", [THERE_AND_BACK, OF_THREE, UNEVEN, IN_TURNS, AHEAD])
@pytest.mark.parametrize("n_slots", [1, 2, 3, 4])
def test_each_part_comes_after_that_of_the_pass_before(parts, n_slots):
    order = [*in_turns(parts, 7, n_slots)]
    for k, i in order[1:]:
        at = order.index((k, i))
        assert not i or order.index((k, i - 1)) < at
        assert not k or order.index((k - 1, i)) < at
        is_single = [device for device, _ in parts].count(parts[i][0]) == 1
        if k and is_single and i + 1 < len(parts):
            assert order.index((k - 1, i + 1)) < at, "else what it made would be written over"
        begun, ended = ({m for m, j in order[:at] if j == of} for of in (0, len(parts) - 1))
        assert len(begun - ended | {k}) <= n_slots
