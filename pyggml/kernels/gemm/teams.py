"""Which thread multiplies what: tasks of the same columns of B form a team.

A task unpacks columns of B, then takes one group of A's rows after the other from those that its
team has left. So a thread that is slow, or comes late, holds nobody up, and a task that comes when
little is left does nothing. The first columns, as many as make whole rounds of the threads, are a
task's alone.

    columns  0 1 2 3   4   5      six, for four threads
    tasks    0 1 2 3  4 6  5 7    and 8, 9 for those who are done early
"""

from typing import Any

import numpy as np

from pyggml.jit import kernel
from pyggml.jit.atomics import exchange_at
from pyggml.jit.frames import Frame, Int, Longs1, Longs2
from pyggml.jit.scratch import Array, per_thread

_LINE = 16  # words from a counter to the next
_WORTH = 3  # groups for which a task unpacks what another multiplies already


class Team(Frame):
    """Fields of a product's frame."""

    n_groups: Int
    n_alone: Int  # columns that are one task's
    n_shared: Int  # the others
    fewest: Int  # groups for which a task that is not the first begins
    taken: Longs1  # of the columns of each team, how many groups; 0 before
    own: Longs2  # of each thread: the groups that it has taken, then −1


@kernel
def team_of(f, task):
    """The number of a task's columns."""
    return task if task < f.n_alone else f.n_alone + (task - f.n_alone) % f.n_shared


@kernel
def is_wanted(f, task):
    """Whether enough of the team's groups are left for one more task."""
    left = f.n_groups - f.taken[team_of(f, task) * _LINE]
    return left >= (f.fewest if task >= f.n_alone + f.n_shared else 1)


@kernel
def columns_of(f, task):
    """A task's columns, of a frame that has n and so many in a task: the first, and the one past
    the last; none if nothing is left of them."""
    first = team_of(f, task) * f.columns
    return first, min(first + f.columns, f.n) if is_wanted(f, task) else first


@kernel
def take_group(f, task, thread, i, is_first):
    """The i-th group that a task multiplies: in its first pass over k the next of its team's, in
    others that of its first pass. −1 if there is none."""
    own = f.own[thread]
    if is_first:
        taken = f.taken[team_of(f, task) * _LINE :]
        own[i], now = -1, taken[0]
        while own[i] < 0 and now < f.n_groups:
            seen = exchange_at(taken.ctypes.data, now, now + 1)
            if seen == now:
                own[i] = now
            now = seen
    return own[i]


def team_arrays(n_groups: int) -> dict[str, Array]:
    """Team's arrays in a layout."""
    return {"own": per_thread(n_groups + 1, dtype=np.int64)}


def teams(n_columns: int, n_groups: int, n_threads: int) -> tuple[dict[str, Any], int]:
    """The other fields of Team, for so many tasks' columns; the number of tasks. `taken` is the
    product's own: others that read the same A run beside it."""
    n_shared = n_columns % n_threads or min(n_columns, n_threads)
    n_members = min(-(-n_threads // n_shared), n_groups)
    n_rounds = n_members + (n_threads > 1 and n_groups > _WORTH)
    fields = {
        "taken": np.zeros(n_columns * _LINE, np.int64),
        "n_groups": n_groups,
        "n_alone": n_columns - n_shared,
        "n_shared": n_shared,
        "fewest": max(1, min(_WORTH, n_groups // n_members)),
    }
    return fields, n_columns - n_shared + n_shared * n_rounds
