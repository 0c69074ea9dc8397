"""Windows of answers → batches, with what a fixed model says of each answer.

The reference never changes. Each window is therefore scored once, when it is first read, and its
scores are kept: one float for each answer. Windows are scored one at a time, so that scores do not
depend on the rest of a batch: a resumed run finds the same numbers.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pyggml.backends.cpu import write
from pyggml.graph import Graph
from pyggml.lora.config import TrainConfig
from pyggml.lora.data import Dataset
from pyggml.lora.data.answers import Preferences
from pyggml.lora.objectives.answers import (
    AnswerBatch,
    AnswerLeaves,
    AnswerObjective,
    Answers,
    answer_batches,
)
from pyggml.lora.objectives.objective import LossNet, Windows
from pyggml.lora.ranks import Ranks
from pyggml.model import Model
from pyggml.models import Inputs
from pyggml.runtime import Program

Programs = Sequence[Program]


class Scorer:
    """One model's graph for the log-probabilities of one window's answers; nothing is trained.

    room: the most answers of a window; mean: over an answer's tokens, else their sum
    """

    def __init__(self, model: Model, ctx: int, room: int, mean: bool) -> None:
        self._inputs, self._leaves = Inputs.empty(ctx), AnswerLeaves.empty(ctx, room)
        net = LossNet.of(model, self._inputs, gradient=False)
        losses = net.token_losses(self._leaves.targets, self._leaves.read)
        self.graph: Graph = net.net.graph(log_probs=self._leaves.log_probs(losses))
        self._room, self._mean = room, mean

    def score(self, program: Program, data: Preferences, window: int) -> np.ndarray:
        """(room,) float32, 0 where there is no answer. program: `graph`, bound."""
        part = data.part(np.array([window]))
        (batch,) = part.batches([0], 1)
        answers = Answers.in_windows(part, self._room)
        for name in ("tokens", "positions", "span"):
            write(getattr(self._inputs, name), getattr(batch, name))
        write(self._leaves.targets, batch.targets)
        write(self._leaves.read, answers.learned.reshape(-1).astype(np.float32))
        write(self._leaves.members, answers.members(self._mean)[0])
        program()
        return program.read(program.schedule.graph["log_probs"])


class AnswerFeed:
    """The batches of one run, and the reference's scores so far."""

    def __init__(
        self,
        objective: AnswerObjective,
        model: Model,
        parts: Sequence[Any],
        config: TrainConfig,
        reference: Model | None,
    ) -> None:
        self._objective, self._size = objective, config.batch
        self._room = max(part.room for part in parts)
        scored = [reference] if objective.has_reference else []
        scored += [model] if objective.has_kl else []
        ctx, mean = parts[0].ctx, objective.per_token
        self._scorers = [Scorer(m, ctx, self._room, mean) for m in scored if m is not None]
        self.graphs = [scorer.graph for scorer in self._scorers]
        self._known: dict[tuple[int, int], np.ndarray] = {}  # dataset, window -> (room,)

    def leaves(self, n_tokens: int) -> AnswerLeaves:
        return AnswerLeaves.empty(n_tokens, self._size * self._room)

    def batches(
        self, programs: Programs, data: Dataset, windows: Windows, ranks: Ranks
    ) -> Iterator[AnswerBatch]:
        assert isinstance(data, Preferences)
        share = ranks.share(-(-len(windows) // self._size))
        mine = slice(share.start * self._size, share.stop * self._size)
        reference = np.zeros((len(windows), self._room), np.float32)
        if self._objective.has_reference:
            with ranks.together():
                reference[mine] = self._references(programs, data, windows[mine])
        kl = self.kl(programs, data, windows, ranks)
        return answer_batches(self._objective, data, windows, self._size, reference, kl)

    def kl(self, programs: Programs, data: Preferences, windows: Windows, ranks: Ranks) -> float:
        """How far the model has moved from the reference, by answers to other prompts; never
        below 0. It is 0 for an objective that does not ask."""
        if not self._objective.has_kl:
            return 0.0
        others = data.mismatched
        assert others is not None
        share = ranks.share(len(windows))
        mine = windows[share.start : share.stop]
        with ranks.together():
            scores = [self._scorers[1].score(programs[1], others, int(w)) for w in mine]
            moved = self._stacked(scores) - self._references(programs, others, mine)
        moved = ranks.joined(moved, len(windows))
        n = Answers.in_windows(others.part(np.asarray(windows, np.int64)), self._room).n
        return max(float(moved.sum(dtype=np.float64)) / n, 0.0)

    def _references(self, programs: Programs, data: Preferences, windows: Windows) -> np.ndarray:
        """The reference's log-probabilities (n, room) float32."""
        numbers = [int(window) for window in windows]
        for window in numbers:
            if (id(data), window) not in self._known:
                score = self._scorers[0].score(programs[0], data, window)
                self._known[id(data), window] = score
        return self._stacked([self._known[id(data), window] for window in numbers])

    def _stacked(self, scores: Sequence[np.ndarray]) -> np.ndarray:
        return np.array(scores, np.float32).reshape(len(scores), self._room)
