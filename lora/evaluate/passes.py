"""Many token sequences → few passes of the graph.

Sequences lie one after the other in a pass and do not see each other. What begins alike is computed
once where one sequence is the beginning of another: choices of one token each cost one sequence in
all. Other choices repeat their prompt, since the keys of a token are one range.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pyggml.backends import write
from pyggml.lora.evaluate.scorer import Scorer
from pyggml.model import Model

N_TOKENS = 512  # of a pass, unless a sequence is longer
_SCORED = 128  # positions whose logits are made at a time
Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens, of which those from `first` on are scored, each after all before it; 0 < first."""

    ids: Ids
    first: int

    @property
    def read(self) -> Ids:
        """The tokens that the model reads: the last one is only predicted."""
        return self.ids[:-1]


@dataclass(slots=True)
class _Row:
    """A sequence that the model reads, and its predictions that are wanted: (position, token) →
    their order."""

    ids: Ids
    wanted: dict[tuple[int, int], int] = field(default_factory=dict)


def log_probs(
    model: Model,
    asked: Sequence[Continuation],
    told: Callable[[int, int], None] = lambda done, n: None,
) -> list[np.ndarray]:
    """log p of the scored tokens of each continuation, float64.

    told(done, n) is called after each of n passes. Every continuation must fit into the model's
    context, and its tokens into the vocabulary.
    """
    if not asked:
        return []
    rows, row_of = _rows(asked)
    order = [_wanted(rows[r], one) for r, one in zip(row_of, asked, strict=True)]
    lengths = [len(row.ids) for row in rows]
    longest = max(lengths)
    n_tokens = max(longest, min(N_TOKENS, sum(lengths)))
    passes = together(lengths, n_tokens)
    scorer = Scorer(model, n_tokens, _SCORED, longest)
    losses = [np.empty(0)] * len(rows)
    for done, some in enumerate(passes, 1):
        positions, targets = _fill(scorer, [rows[r] for r in some])
        found = scorer.score(positions, targets).losses
        ends = np.cumsum([len(rows[r].wanted) for r in some])
        for r, part in zip(some, np.split(found, ends[:-1]), strict=True):
            losses[r] = part
        told(done, len(passes))
    return [-losses[r][which] for r, which in zip(row_of, order, strict=True)]


def _rows(asked: Sequence[Continuation]) -> tuple[list[_Row], list[int]]:
    """The sequences to read, none the beginning of another; the number of each continuation's."""
    rows, row_of = list[_Row](), [0] * len(asked)
    # In falling order a sequence follows those that begin with it, if there are any.
    for i in sorted(range(len(asked)), key=lambda i: asked[i].read, reverse=True):
        read = asked[i].read
        if not rows or rows[-1].ids[: len(read)] != read:
            rows.append(_Row(read))
        row_of[i] = len(rows) - 1
    return rows, row_of


def _wanted(row: _Row, one: Continuation) -> list[int]:
    """The places of a continuation's tokens among the row's predictions, which it may add to."""
    keys = ((at - 1, one.ids[at]) for at in range(one.first, len(one.ids)))
    return [row.wanted.setdefault(key, len(row.wanted)) for key in keys]


def together(lengths: Sequence[int], n_tokens: int) -> list[list[int]]:
    """Numbers of the sequences of each pass: the longest first, each where it leaves least room."""
    passes, rooms = list[list[int]](), list[tuple[int, int]]()  # room, number of its pass
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(rooms, (lengths[i], -1))
        room, number = rooms.pop(at) if at < len(rooms) else (n_tokens, len(passes))
        if number == len(passes):
            passes.append([])
        passes[number].append(i)
        insort(rooms, (room - lengths[i], number))
    return passes


def _fill(scorer: Scorer, rows: Sequence[_Row]) -> tuple[np.ndarray, np.ndarray]:
    """Write the rows into a pass; the positions and tokens of all predictions that are wanted.

    What is left of the pass are sequences of one token, which nobody reads.
    """
    n_tokens = scorer.inputs.tokens.shape[0]
    tokens, positions = np.zeros(n_tokens, np.int32), np.zeros(n_tokens, np.int32)
    span = np.arange(n_tokens, dtype=np.int32)[:, None] + np.array([0, 1], np.int32)
    at, targets, start = list[int](), list[int](), 0
    for row in rows:
        here = slice(start, start + len(row.ids))
        tokens[here], positions[here], span[here, 0] = row.ids, np.arange(len(row.ids)), start
        at += [start + position for position, _ in row.wanted]
        targets += [token for _, token in row.wanted]
        start = here.stop
    for name, values in (("tokens", tokens), ("positions", positions), ("span", span)):
        write(getattr(scorer.inputs, name), values)
    return np.array(at), np.array(targets, np.int32)
