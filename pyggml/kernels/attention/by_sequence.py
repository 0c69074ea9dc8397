"""The path `by sequence`: queries of several sequences, whose keys lie in one cache.

Queries that follow one another in a sequence are a problem of their own over the keys that these
see. All others, such as the one query of each sequence that is being written, are together a
problem of few queries. Each goes to the path that would serve it alone: its work is that of the
keys seen, however large the cache is, and its result that of the sequence alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import pairwise

import numpy as np

from pyggml.errors import PyggmlError
from pyggml.graph.call import Call
from pyggml.jit import kernel
from pyggml.jit.frames import Frame, Int, Ints1, Ints2, Longs1, Longs2
from pyggml.jit.scratch import Array, Layout, Scratch
from pyggml.jit.tasks import TaskStage, gate, launch, stage, task_code
from pyggml.kernels.attention.flash_tile import MR
from pyggml.kernels.attention.path import (
    PROBLEMS,
    AttentionPath,
    AttentionProblem,
    Forward,
    SomeQueries,
    layout_of,
)

MOST_TOGETHER = 16  # queries of a problem of few, which bounds its scratch
_RUNS_KEPT = 4  # bound runs
_LAST_CHANGE = 32  # queries: from so many on, the path does not depend on their number

# (problem, queries, keys) -> the problem of so many of them alone, and the path that serves it
_PartOf = Callable[[AttentionProblem, int, int], tuple[AttentionProblem, AttentionPath[Forward]]]


def by_sequence(paths: tuple[AttentionPath[Forward], ...]) -> AttentionPath[Forward]:
    """The path above these, which serve its parts."""

    def takes(p: AttentionProblem) -> bool:
        return p.n_seen < p.n_keys and p.n_queries >= MR

    @lru_cache(PROBLEMS)
    def part_of(
        p: AttentionProblem, n_queries: int, n_keys: int
    ) -> tuple[AttentionProblem, AttentionPath[Forward]]:
        part = replace(p, n_queries=n_queries, n_keys=n_keys)
        return part, next(path for path in paths if path.takes(part))

    @cache
    def n_bytes(p: AttentionProblem) -> int:
        """The most scratch of any part."""
        counts = {min(n, p.n_queries) for n in (*range(MR, _LAST_CHANGE + 1), p.n_queries)}
        runs = [part_of(p, n, p.n_seen) for n in counts]
        together = replace(p, n_queries=min(p.n_queries, MOST_TOGETHER))
        few = part_of(p, 1, p.n_keys)[1]
        return max(few.n_bytes(together), *(path.n_bytes(run) for run, path in runs))

    def layout(p: AttentionProblem) -> Layout:
        return Layout(lse=Array((p.n_heads * p.n_queries,)), part=Array((n_bytes(p),), np.uint8))

    def bind(p: AttentionProblem, a: Forward, scratch: Scratch) -> Call:
        bound = _BoundSequences(part_of, p, a, scratch)
        of_few = bound.stages_of_few()
        if not of_few:
            return Call(bound.run)
        return Call(launch, *of_few)

    return AttentionPath("by sequence", False, takes, layout, bind)


class _Order(Frame):
    """Which queries are few of their sequence."""

    span: Ints2
    few: Ints1  # the numbers of these
    counts: Longs2  # of each group of MOST_TOGETHER of these, first how many they are
    runs: Longs1  # one number: −1 if there are runs that no stage computes, else 0
    # Of the stages of one run over the first keys, after which queries see nothing: how many tasks
    # each has; the same if there is such a run now, else 0; what its queries see.
    tasks: Longs1
    tasks_now: Longs1
    own_span: Ints2
    n_keys: Int  # of these keys


@kernel
def _is_alone(f, n):
    """Whether stages are bound to the run of the first n queries: one over the first keys, after
    which queries see nothing. Then it also writes what they see."""
    if f.tasks.size == 0 or n < min(f.span.shape[0], _LAST_CHANGE):
        return False
    first, last = f.n_keys, 0
    for i in range(n):
        first, last = min(first, f.span[i, 0]), max(last, f.span[i, 1])
    for i in range(n, f.span.shape[0]):
        if f.span[i, 0] < f.span[i, 1]:
            return False
    for i in range(f.span.shape[0]):
        f.own_span[i, 0] = f.span[i, 0] if i < n else 0
        f.own_span[i, 1] = f.span[i, 1] if i < n else 0
    return first == 0 and last <= f.n_keys


@task_code(_Order)
def _order_task(f, task, thread):
    n, n_few, first, is_one = len(f.span), 0, 0, False
    f.runs[0] = 0
    while first < n:
        stop = first + 1
        while stop < n and f.span[stop, 1] == f.span[stop - 1, 1] + 1:
            if f.span[stop, 0] >= f.span[stop - 1, 1]:
                break
            stop += 1
        if stop - first >= MR:
            is_one = first == 0 and _is_alone(f, stop)
            f.runs[0] = 0 if is_one else -1
        else:
            for t in range(first, stop):
                f.few[n_few] = t
                n_few += 1
        first = stop
    for i in range(f.tasks.size):
        f.tasks_now[i] = f.tasks[i] if is_one else 0
    for group in range(len(f.counts)):
        f.counts[group, 0] = min(max(n_few - group * MOST_TOGETHER, 0), MOST_TOGETHER)


class _BoundSequences:
    """Attention bound to memory; which sequences the queries are of is seen when it runs."""

    def __init__(self, part_of: _PartOf, p: AttentionProblem, a: Forward, scratch: Scratch) -> None:
        self.part_of, self.p, self.a = part_of, p, a
        self.lse, self.memory = scratch["lse"], scratch["part"]
        self.few = part_of(p, 1, p.n_keys)[1]
        self.runs: dict[tuple[int, ...], tuple[Forward, Call]] = {}  # the last one used at the end

    def stages_of_few(self) -> list[TaskStage]:
        """The stages of those queries that are no run, then those that are; none where the path of
        few has none."""
        n, of_some = self.p.n_queries, self.few.of_some
        if of_some is None:
            return []
        most = replace(self.p, n_queries=min(n, MOST_TOGETHER))
        scratch = layout_of(self.few, most).cut(self.memory)
        few, runs = np.empty(n, np.int32), np.zeros(1, np.int64)
        starts = range(0, n, MOST_TOGETHER)
        counts = np.zeros((len(starts), 4), np.int64)
        own_span = np.zeros_like(self.a.span)
        of_one = self._stages_of_one(own_span)
        tasks = np.array([s.n_tasks for s in of_one], np.int64)
        now = np.zeros_like(tasks)
        order = _Order(
            span=self.a.span, few=few, counts=counts, runs=runs, tasks=tasks, tasks_now=now,
            own_span=own_span, n_keys=self.p.n_seen,
        )  # fmt: skip
        stages = [stage(_order_task, order, 1)]
        for i, each in enumerate(of_one):  # as how many tasks there are is not known
            stages.append(each._replace(n_tasks=now[i : i + 1], touches=()))
        for start, own in zip(starts, counts, strict=True):
            group = SomeQueries(few[start : start + MOST_TOGETHER], own)
            stages += of_some(most, self.a, scratch, group)
        return [*stages, gate(runs, partial(self.run, True))]

    def _stages_of_one(self, span: np.ndarray) -> Sequence[TaskStage]:
        """The stages of all queries as one run over the first keys; none where Python would have to
        be called between them."""
        p, path = self.part_of(self.p, self.p.n_queries, self.p.n_seen)
        k, v = self.a.k[: self.p.n_seen], self.a.v[: self.p.n_seen]
        call = path.call(p, replace(self.a, k=k, v=v, span=span), self.memory)
        stages = call.arguments if call.kernel is launch else ()
        return stages if all(isinstance(s.n_tasks, int) for s in stages) else ()

    def run(self, runs_alone: bool = False) -> None:
        """Attention of all queries, or of those in runs."""
        for first, stop, is_run in _parts(self.a.span):
            if runs_alone and not is_run:
                continue
            if is_run:
                span = self.a.span[first:stop]
                start, end = int(span[:, 0].min()), int(span[:, 1].max())
                if end - start > self.p.n_seen:
                    raise PyggmlError(
                        f"flash_attn: queries {first} to {stop} see the keys from {start} to "
                        f"{end}, wanted {self.p.n_seen} at most for one sequence"
                    )
                part, call = self.run_of(first, stop, start)
                np.subtract(span, start, out=part.span)
            else:
                part = self._queries(first, stop)
                call = self._of_few(part)
            call()
            self.a.lse[:, first:stop] = part.lse

    def run_of(self, *where: int) -> tuple[Forward, Call]:
        """`_run_of`, remembered. A functools cache would hold this object, and never let it go."""
        run = self.runs.pop(where, None) or self._run_of(*where)
        self.runs[where] = run
        if len(self.runs) > _RUNS_KEPT:
            del self.runs[next(iter(self.runs))]
        return run

    def _run_of(self, first: int, stop: int, start: int) -> tuple[Forward, Call]:
        """Queries [first, stop) over all keys that their sequence may have from `start` on: the
        next ones of a prompt find it bound. Its span is written in each run."""
        part, end = self._queries(first, stop), start + self.p.n_seen
        k, v = self.a.k[start:end], self.a.v[start:end]
        part = replace(part, k=k, v=v, span=np.empty_like(part.span))
        p, path = self.part_of(self.p, stop - first, len(k))
        return part, path.call(p, part, self.memory)

    def _queries(self, first: int, stop: int) -> Forward:
        """The arrays of some queries. Their lse has memory of its own, as it must not have gaps."""
        a, rows, n_heads = self.a, slice(first, stop), self.p.n_heads
        lse = self.lse[: n_heads * (stop - first)].reshape(n_heads, -1)
        return replace(a, q=a.q[rows], span=a.span[rows], o=a.o[rows], lse=lse)

    def _of_few(self, part: Forward) -> Call:
        """Queries that are not a run, over all keys."""
        return self.few.call(replace(self.p, n_queries=len(part.q)), part, self.memory)


def _parts(span: np.ndarray) -> Iterator[tuple[int, int, bool]]:
    """(first query, the one past the last, whether the part is a run) of each part.

    In a run every query sees one key more than the query before.
    """
    breaks = (np.diff(span[:, 1]) != 1) | (span[1:, 0] >= span[:-1, 1])
    bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(span)]
    runs = [(first, stop) for first, stop in pairwise(bounds) if stop - first >= MR]
    waiting = 0
    for first, stop in (*runs, (len(span), len(span))):
        for i in range(waiting, first, MOST_TOGETHER):
            yield i, min(i + MOST_TOGETHER, first), False
        if first < stop:
            yield first, stop, True
        waiting = stop
