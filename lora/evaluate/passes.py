"""Many token sequences → few passes of the graph.

Sequences lie one after the other in a pass and do not see each other. What begins alike is computed
once where one sequence is the beginning of another: choices of one token each cost one sequence in
all. Two others share their beginning as well. The keys of a token are one range, but it may lie on
either side: one sequence goes on behind the beginning, the other before it, its tokens from right
to left. That needs attention which does not ask how far a key is (`_takes_pairs`).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pyggml.generation.drafts import n_common
from pyggml.graph import Graph
from pyggml.graph.arrays import write
from pyggml.lora.evaluate.scorer import Predictions, Scorer
from pyggml.model import Model
from pyggml.models import Inputs, Net
from pyggml.ops.attention.mask import CHUNK_SPAN, WINDOW_SPAN

N_TOKENS = 512  # of a pass, unless a sequence is longer
_WORTH_SHARING = 8  # tokens that two rows begin with
_SCORED = 128  # positions whose logits are made at a time
Ids = tuple[int, ...]
Hear = Callable[[int, int], None]  # after each of n passes: how many are done, and n


def unheard(done: int, n: int) -> None:
    """Nobody is told."""


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
class _WantedRow:
    """A sequence that the model reads, and its predictions that are wanted: (position, token) →
    their order."""

    ids: Ids
    predictions: dict[tuple[int, int], int] = field(default_factory=dict)

    def places(self, one: Continuation) -> list[int]:
        """Those of a continuation's tokens among the predictions, which it may add to."""
        keys = ((at - 1, one.ids[at]) for at in range(one.first, len(one.ids)))
        return [self.predictions.setdefault(key, len(self.predictions)) for key in keys]


@dataclass(slots=True)
class _SharedStart:
    """One row, or two of which the first n_shared tokens are the same; by their numbers."""

    rows: list[int]
    n_shared: int = 0

    def n_tokens(self, rows: Sequence[_WantedRow]) -> int:
        """Tokens of a pass that it takes."""
        return sum(len(rows[r].ids) for r in self.rows) - self.n_shared


def log_probs(
    model: Model, continuations: Sequence[Continuation], report: Hear = unheard
) -> list[np.ndarray]:
    """log p of the scored tokens of each continuation, float64; otherwise as `predict`."""
    return [-p.losses for p in predict(model, continuations, report)]


def predict(
    model: Model, continuations: Sequence[Continuation], report: Hear = unheard
) -> list[Predictions]:
    """The scored tokens of each continuation as the model predicts them. Every continuation must
    fit into the model's context, and its tokens into the vocabulary."""
    if not continuations:
        return []
    rows, row_of = _rows(continuations, model.config.n_ctx_short)
    order = [rows[r].places(one) for r, one in zip(row_of, continuations, strict=True)]
    longest = max(len(row.ids) for row in rows)
    groups = _groups(rows, _takes_pairs(model), model.config.n_ctx_short)
    lengths = [group.n_tokens(rows) for group in groups]
    n_tokens = max(*lengths, min(N_TOKENS, sum(lengths)))
    passes = together(lengths, n_tokens)
    scorer = Scorer(model, n_tokens, _SCORED, longest)
    of_rows = [Predictions(np.empty(0), np.empty(0, np.bool_))] * len(rows)
    for done, batch in enumerate(passes, 1):
        positions, targets = _fill(scorer, rows, [groups[g] for g in batch])
        of_pass = scorer.score(positions, targets)
        read = [r for g in batch for r in groups[g].rows]
        ends = np.cumsum([len(rows[r].predictions) for r in read])
        parts = (np.split(array, ends[:-1]) for array in (of_pass.losses, of_pass.right))
        for r, *of_row in zip(read, *parts, strict=True):
            of_rows[r] = Predictions(*of_row)
        report(done, len(passes))
    return [
        Predictions(of_rows[r].losses[which], of_rows[r].right[which])
        for r, which in zip(row_of, order, strict=True)
    ]


def _turn_alike(one: Ids, other: Ids, n_ctx_short: int | None) -> bool:
    """Whether two sequences have the same rotary factors."""
    return n_ctx_short is None or (len(one) > n_ctx_short) == (len(other) > n_ctx_short)


def _rows(
    asked: Sequence[Continuation], n_ctx_short: int | None
) -> tuple[list[_WantedRow], list[int]]:
    """The sequences to read, none the beginning of another with the same rotary factors; the
    number of each continuation's."""
    rows, row_of = list[_WantedRow](), [0] * len(asked)
    # In falling order a sequence follows those that begin with it, if there are any.
    for i in sorted(range(len(asked)), key=lambda i: asked[i].read, reverse=True):
        read = asked[i].read
        last = rows[-1].ids if rows else ()
        if last[: len(read)] != read or not _turn_alike(last, read, n_ctx_short):
            rows.append(_WantedRow(read))
        row_of[i] = len(rows) - 1
    return rows, row_of


def _takes_pairs(model: Model) -> bool:
    """Whether a token's keys may lie on either side of it: no part has a window, a bias by distance
    or a state."""
    net = Net(model.parts.weights, Inputs.empty(1), model.adapters)
    nodes = Graph.of(model.parts.decoder.hidden(net)).nodes
    looks_back = [n for n in nodes if n.op in (WINDOW_SPAN, CHUNK_SPAN) or n.params.get("max_bias")]
    return model.batches and not looks_back


def _groups(
    rows: Sequence[_WantedRow], in_pairs: bool, n_ctx_short: int | None
) -> list[_SharedStart]:
    """Every row, in its order; neighbours that begin alike in pairs."""
    groups = list[_SharedStart]()
    for r, row in enumerate(rows):
        before = groups[-1] if groups else _SharedStart([])
        if in_pairs and len(before.rows) == 1:
            n = n_common(rows[r - 1].ids, row.ids)
            if n >= _WORTH_SHARING and _turn_alike(rows[r - 1].ids, row.ids, n_ctx_short):
                before.rows.append(r)
                before.n_shared = n
                continue
        groups.append(_SharedStart([r]))
    return groups


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


def _fill(
    scorer: Scorer, rows: Sequence[_WantedRow], groups: Sequence[_SharedStart]
) -> tuple[np.ndarray, np.ndarray]:
    """Write the groups into a pass; the positions and tokens of all predictions that are wanted.

    What is left of the pass are sequences of one token, which nobody reads.
    """
    n_tokens = scorer.inputs.tokens.shape[0]
    tokens, positions = np.zeros(n_tokens, np.int32), np.zeros(n_tokens, np.int32)
    span = np.arange(n_tokens, dtype=np.int32)[:, None] + np.array([0, 1], np.int32)
    length = np.zeros(n_tokens, np.float32)
    at, targets, start = list[int](), list[int](), 0
    for group in groups:
        first, *second = (rows[r] for r in group.rows)
        n, stop = group.n_shared, start + group.n_tokens(rows)
        shared_at = stop - len(first.ids)
        places = [np.arange(shared_at, stop)]  # of each row's tokens
        span[places[0], 0] = shared_at
        if second:
            places.append(np.r_[shared_at : shared_at + n, shared_at - 1 : start - 1 : -1])
            span[start:shared_at, 1] = shared_at + n
        for row, where in zip([first, *second], places, strict=True):
            tokens[where], positions[where] = row.ids, np.arange(len(row.ids))
            length[where] = len(row.ids)
            at += [where[position] for position, _ in row.predictions]
            targets += [token for _, token in row.predictions]
        start = stop
    arrays = {"tokens": tokens, "positions": positions, "span": span, "length": length}
    for name, values in arrays.items():
        write(getattr(scorer.inputs, name), values)
    return np.array(at), np.array(targets, np.int32)
