"""The path `by sequence`: queries of several sequences, whose keys lie in one cache.

Queries that follow one another in a sequence are a problem of their own over the keys that these
see. All others, such as the one query of each sequence that is being written, are together a
problem of few queries. Each goes to the path that would serve it alone: its work is that of the
keys seen, however large the cache is, and its result that of the sequence alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np

from pyggml.attention.path import Forward, Path, Problem
from pyggml.attention.tiles import MR
from pyggml.call import Call
from pyggml.scratch import Array, Layout, Scratch

MOST_TOGETHER = 16  # queries of a problem of few, which bounds its scratch
_LAST_CHANGE = 32  # from so many queries on one path serves any number


def by_sequence(paths: tuple[Path[Forward], ...]) -> Path[Forward]:
    """The path above these, which serve its parts."""

    def takes(p: Problem) -> bool:
        return p.n_seen < p.n_keys and p.n_queries >= MR

    def serving(p: Problem) -> Path[Forward]:
        return next(path for path in paths if path.takes(p))

    @cache
    def n_bytes(p: Problem) -> int:
        """The most scratch of any part."""
        counts = {min(n, p.n_queries) for n in (*range(MR, _LAST_CHANGE + 1), p.n_queries)}
        runs = [replace(p, n_queries=n, n_keys=p.n_seen) for n in counts]
        some = replace(p, n_queries=min(p.n_queries, MOST_TOGETHER))
        few = serving(replace(p, n_queries=1))
        return max(few.n_bytes(some), *(serving(run).n_bytes(run) for run in runs))

    def layout(p: Problem) -> Layout:
        return Layout(lse=Array((p.n_heads * p.n_queries,)), part=Array((n_bytes(p),), np.uint8))

    def bind(p: Problem, a: Forward, scratch: Scratch) -> Call:
        few = serving(replace(p, n_queries=1))
        all_few = few.call(p, a, scratch["part"]) if p.n_queries <= MOST_TOGETHER else None

        def run() -> None:
            parts = list(_parts(a.span))
            if all_few is not None and parts == [(0, p.n_queries, False)]:
                return all_few()
            for first, stop, is_run in parts:
                part = _queries(a, first, stop, scratch["lse"])
                part = _own_keys(part) if is_run else part
                q = replace(p, n_queries=stop - first, n_keys=len(part.k))
                (serving(q) if is_run else few).call(q, part, scratch["part"])()
                a.lse[:, first:stop] = part.lse

        return Call(run)

    return Path("by sequence", False, takes, layout, bind)


def _parts(span: np.ndarray) -> Iterator[tuple[int, int, bool]]:
    """The first query of each part, the one past its last, and whether they are a run: each sees
    the key after the last one of the query before."""
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


def _queries(a: Forward, first: int, stop: int, memory: np.ndarray) -> Forward:
    """The arrays of some queries, but memory for their lse, which is not to have gaps."""
    rows, n_heads = slice(first, stop), len(a.lse)
    lse = memory[: n_heads * (stop - first)].reshape(n_heads, -1)
    return replace(a, q=a.q[rows], span=a.span[rows], o=a.o[rows], lse=lse)


def _own_keys(a: Forward) -> Forward:
    """The arrays with the keys that its queries see alone."""
    first, stop = a.span[:, 0].min(), a.span[:, 1].max()
    return replace(a, k=a.k[first:stop], v=a.v[first:stop], span=a.span - first)
