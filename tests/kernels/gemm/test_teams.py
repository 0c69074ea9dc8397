"""Teams take each group of rows once, whichever threads come, and in which order."""

import numpy as np
import pytest

from pyggml.jit import JIT, kernel
from pyggml.jit.frames import Longs2
from pyggml.jit.tasks import launch, stage, task_code
from pyggml.kernels.gemm import by_expert
from pyggml.kernels.gemm.teams import Team, is_wanted, take_group, team_of, teams

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(not JIT, reason="tasks need the JIT"),
]


class Turns(Team):
    """What threads do, one after the other: each turn, one of them takes a group."""

    turns: Longs2  # (1, n) the thread of each turn
    order: Longs2  # (1, tasks)
    done: Longs2  # (columns, groups): how often each was multiplied in both passes
    state: Longs2  # of each thread: its task or −1, groups so far, its pass


@kernel
def _begin(f, thread, next_task):
    """Give a thread the next task that is wanted; how many were looked at."""
    while next_task < f.order.shape[1]:
        task, next_task = f.order[0, next_task], next_task + 1
        if is_wanted(f, task):
            f.state[thread] = np.array([task, 0, 0])
            break
    return next_task


@task_code(Turns)
def _play(f, task, thread):
    next_task = 0
    for turn in range(f.turns.shape[1]):
        t = f.turns[0, turn]
        if f.state[t, 0] < 0:
            next_task = _begin(f, t, next_task)
            continue
        own, i, n_pass = f.state[t]
        g = take_group(f, own, t, i, n_pass == 0)
        if g >= 0:
            f.done[team_of(f, own), g] += 1 if n_pass == 0 else 100
            f.state[t, 1] += 1
        else:
            f.state[t] = np.array([own, 0, 1]) if n_pass == 0 else np.array([-1, 0, 0])


@pytest.mark.parametrize("n_threads", [1, 2, 3, 16])
@pytest.mark.parametrize("n_columns", [1, 4, 12, 32])
@pytest.mark.parametrize("n_groups", [1, 2, 16])
def test_every_group_is_multiplied_once_in_each_pass(n_columns, n_groups, n_threads, rng):
    fields, n_tasks = teams(n_columns, n_groups, n_threads)
    n = 40 * n_columns * (n_groups + 3) * (n_threads + 1) + 40 * n_tasks
    f = Turns(
        own=np.zeros((n_threads, n_groups + 1), np.int64),
        turns=rng.integers(0, n_threads, (1, n)),
        order=rng.permutation(n_tasks).reshape(1, -1),
        done=np.zeros((n_columns, n_groups), np.int64),
        state=np.full((n_threads, 3), -1),
        **fields,
    )
    launch(stage(_play, f, 1))
    assert (f.values["done"] == 101).all()


@task_code(Turns)
def _take_all(f, task, thread):
    i = 0
    while take_group(f, task, task, i, True) >= 0:
        i += 1


def test_tasks_that_take_at_the_same_time_take_different_groups():
    n_groups, n_tasks = 1 << 16, 4
    own = np.full((n_tasks, n_groups + 1), -1)
    none = np.zeros((1, 1), np.int64)
    fields = teams(1, n_groups, n_tasks)[0]
    f = Turns(own=own, turns=none, order=none, done=none, state=none, **fields)
    launch(stage(_take_all, f, n_tasks))
    np.testing.assert_array_equal(np.sort(own[own >= 0]), np.arange(n_groups))


def test_columns_that_make_whole_rounds_are_one_tasks_each():
    fields, n_tasks = teams(n_columns=24, n_groups=16, n_threads=16)
    assert (fields["n_alone"], fields["n_shared"], n_tasks) == (16, 8, 16 + 8 * 3)
    fields, n_tasks = teams(n_columns=4, n_groups=16, n_threads=16)
    assert (fields["n_alone"], fields["n_shared"], n_tasks) == (0, 4, 4 * 5)
    assert teams(n_columns=4, n_groups=16, n_threads=1)[1] == 4


def test_a_product_by_expert_has_counters_of_its_own():
    """All jobs of a node have the words of one frame, and share its other arrays."""
    shared = np.zeros(8, np.int64)
    rows = shared.reshape(2, 4)
    fields = teams(3, 2, 2)[0]
    f = Turns(own=rows, turns=rows, order=rows, done=rows[:0], state=rows, **fields)
    ((place, counters),) = by_expert._own_arrays(f, {0: shared})
    assert counters is fields["taken"] and f.words[place] == counters.ctypes.data
