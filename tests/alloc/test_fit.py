"""The arena hands out aligned blocks that never overlap, merges holes and knows its peak."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyggml.alloc.fit import ALIGNMENT, Arena
from pyggml.sizes import round_up


@pytest.mark.parametrize(("n", "wanted"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128)])
def test_sizes_are_rounded_up_to_cache_lines(n, wanted):
    assert round_up(n, ALIGNMENT) == wanted


def test_blocks_follow_one_another():
    arena = Arena()
    assert [arena.take(n) for n in (1, 64, 100)] == [0, 64, 128]
    assert arena.peak == 256


def test_the_smallest_hole_that_fits_is_taken():
    arena = Arena()
    big, _, small, _ = (arena.take(n) for n in (640, 64, 128, 64))
    arena.give_back(big, 640)
    arena.give_back(small, 128)
    assert arena.take(100) == small
    assert arena.take(100) == big
    assert arena.take(500) == big + 128
    assert arena.peak == 640 + 64 + 128 + 64


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_neighbouring_holes_become_one(order):
    arena = Arena()
    starts = [arena.take(64) for _ in range(3)]
    arena.take(64)
    for i in order:
        arena.give_back(starts[i], 64)
    assert arena.take(192) == 0
    assert arena.peak == 256


def test_a_hole_at_the_end_is_stretched():
    arena = Arena()
    arena.take(64)
    last = arena.take(64)
    arena.give_back(last, 64)
    assert arena.take(1000) == last
    assert arena.peak == 64 + 1024


def test_a_hole_in_the_middle_is_not_stretched():
    arena = Arena()
    first = arena.take(64)
    arena.take(64)
    arena.give_back(first, 64)
    assert arena.take(128) == 128


def test_nothing_takes_no_room():
    arena = Arena()
    arena.take(64)
    start = arena.take(0)
    arena.give_back(start, 0)
    assert arena.take(64) == 64
    assert arena.peak == 128


def test_what_is_given_back_last_waits():
    arena = Arena(room=128)
    starts = [arena.take(64) for _ in range(4)]
    for start in starts:
        arena.give_back(start, 64)
    assert [arena.take(64) for _ in range(3)] == [0, 64, 256]


@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(0, 7)), max_size=40),
    st.sampled_from([0, 500]),
)
def test_blocks_in_use_never_overlap(steps, room):
    """Each step takes a block; one in two steps also gives one of the oldest back."""
    arena, used, in_use_at_most = Arena(room), [], 0
    for size, choice in steps:
        start = arena.take(size)
        assert start % ALIGNMENT == 0
        assert start + round_up(size, ALIGNMENT) <= arena.peak
        assert all(start + size <= s or s + n <= start for s, n in used if n and size)
        used.append((start, size))
        in_use_at_most = max(in_use_at_most, sum(round_up(n, ALIGNMENT) for _, n in used))
        if choice % 2:
            arena.give_back(*used.pop(choice % len(used)))
    assert arena.peak >= in_use_at_most
    for block in used:
        arena.give_back(*block)
    if arena.peak and not room:
        assert arena.take(arena.peak) == 0, "all is free again, so the arena is one hole"
