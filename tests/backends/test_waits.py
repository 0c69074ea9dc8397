"""Which steps wait for which, against all pairs compared."""

from hypothesis import given
from hypothesis import strategies as st

from pyggml.backends.cuda.runtime.waits import Range, StepAccess, waits

RANGES = st.lists(
    st.builds(lambda a, n: Range(a, a + n), st.integers(0, 30), st.integers(1, 12)), max_size=3
)
STEPS = st.lists(st.builds(StepAccess, RANGES, RANGES), max_size=14)


def overlap(some, others):
    return any(a.first < b.last and b.first < a.last for a in some for b in others)


def conflict(a, b):
    return overlap(a.writes, (*b.reads, *b.writes)) or overlap(a.reads, b.writes)


def all_before(edges):
    """For each step, all that end before it begins."""
    before = []
    for direct in edges:
        before.append(set(direct).union(*(before[j] for j in direct)))
    return before


@given(STEPS)
def test_steps_wait_for_all_that_they_conflict_with(steps):
    wanted = all_before([[j for j in range(i) if conflict(steps[j], steps[i])]
                         for i in range(len(steps))])  # fmt: skip
    assert all_before(waits(steps)) == wanted


@given(STEPS)
def test_no_step_waits_twice(steps):
    found = waits(steps)
    before = all_before(found)
    for direct in found:
        assert not any(a in before[b] for a in direct for b in direct)


def test_readers_run_side_by_side():
    x, a, b = Range(0, 8), Range(8, 16), Range(16, 24)
    steps = [
        StepAccess([], [x]),
        StepAccess([x], [a]),
        StepAccess([x], [b]),
        StepAccess([a, b], [x]),
    ]
    assert waits(steps) == [(), (0,), (0,), (1, 2)]
