"""Preferences as an objective: windows in, loss and rewards of a step out.

The reference never changes. Each window is therefore scored once, when it is first read, and its
scores are kept: one float for each answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from pyggml.backends.cpu import read
from pyggml.errors import ConfigError
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.config import PreferenceConfig, TrainConfig
from pyggml.lora.data import Corpus, Dataset
from pyggml.lora.data.answers import Preferences
from pyggml.lora.objectives.answers import AnswerBatch, Answers, batches
from pyggml.lora.objectives.losses import PreferenceLoss
from pyggml.lora.objectives.objective import NOT_SHARED, Outcome, Sharing, Windows
from pyggml.lora.objectives.scorer import Scorer
from pyggml.lora.ranks import ALONE, Ranks
from pyggml.lora.trainer.passes import Passes
from pyggml.lora.trainer.reports import Rewards
from pyggml.model import Model


@dataclass(frozen=True, slots=True)
class Preference:
    """The objective of DPO, ORPO or KTO.

    reference: the fixed model to compare answers with: the base, or the base with the adapter from
    which training starts. ORPO has none.
    """

    config: PreferenceConfig
    reference: Model

    def settled(self) -> Mapping[str, Any]:
        found = dict(self.config.settled())
        if self.config.objective != "orpo" and self.reference.adapters:
            found["reference"] = _digest(self.reference)
        return found

    def of(
        self, model: Model, parameters: Parameters, corpus: Corpus, config: TrainConfig
    ) -> _Preference:
        """Raises ConfigError if the corpus has no preferences of this kind."""
        for part in (corpus.train, corpus.validation):
            if part is not None and not isinstance(part, Preferences):
                fault = f"is {self.config.objective}, but the corpus has no preferences"
                raise ConfigError([("objective", fault)])
        return _Preference(self, model, parameters, corpus, config)


def _digest(model: Model) -> str:
    """SHA-256 of a model's adapters."""
    digest = hashlib.sha256()
    for pairs in model.adapters:
        for name, pair in pairs.items():
            digest.update(f"{name} {pair.scale!r}".encode())
            for t in (pair.a, pair.b):
                digest.update(read(t).tobytes())
    return digest.hexdigest()[:32]


class _Preference:
    """The graphs of one run, and the reference's scores so far."""

    def __init__(
        self,
        objective: Preference,
        model: Model,
        parameters: Parameters,
        corpus: Corpus,
        config: TrainConfig,
    ) -> None:
        parts = [p for p in (corpus.train, corpus.validation) if isinstance(p, Preferences)]
        ctx, room = corpus.train.ctx, max(p.room for p in parts)
        self._config, self._batch, self._room = objective.config, config.batch, room
        kind, scorers = self._config.objective, list[Scorer]()
        if kind != "orpo":
            scorers.append(Scorer(objective.reference, ctx, room))
        if kind == "kto":
            scorers.append(Scorer(model, ctx, room))
        self._scorers = scorers
        self.passes = Passes.of(
            *(model, parameters, config, ctx),
            loss=lambda n: PreferenceLoss(self._config, n, config.batch * room),
            others=[s.graph for s in scorers],
        )
        self._known: dict[tuple[int, int], np.ndarray] = {}  # dataset, window -> (room,)

    def train(self, data: Dataset, windows: Windows, sharing: Sharing = NOT_SHARED) -> Outcome:
        return self._outcome(data, windows, sharing, training=True)

    def evaluate(self, data: Dataset, windows: Windows, sharing: Sharing = NOT_SHARED) -> Outcome:
        return self._outcome(data, windows, sharing, training=False)

    def _outcome(
        self, data: Dataset, windows: Windows, sharing: Sharing, training: bool
    ) -> Outcome:
        assert isinstance(data, Preferences)
        run = self.passes.train if training else self.passes.evaluate
        n, ranks = ceil(len(windows) / self._batch), sharing.ranks
        share = ranks.share(n)
        mine = slice(share.start * self._batch, share.stop * self._batch)
        reference = np.zeros((len(windows), self._room), np.float32)
        with ranks.together():
            reference[mine] = self._references(data, windows[mine])
        kl = self._kl(data, windows, ranks)
        kind, beta = self._config.objective, self._config.beta

        def loss_and_rewards(batch: AnswerBatch) -> tuple[float, ...]:
            loss = run(batch)
            (found,) = self.passes.watched
            above = beta * (found - batch.reference)
            return loss, *_rewards(batch, above, beta * kl, kind).numbers

        found = batches(
            data, windows, self._batch, self._room, self._config, reference + np.float32(kl)
        )
        rows = sharing.over(found, n, loss_and_rewards, 1 + len(Rewards().numbers)).tolist()
        loss = 0.0
        for part, *_ in rows:
            loss += part
        return Outcome(loss, rewards=sum((Rewards.of(row[1:]) for row in rows), Rewards()))

    def _kl(self, data: Preferences, windows: Windows, ranks: Ranks = ALONE) -> float:
        """How far the model has moved from the reference, by answers to other prompts; never
        below 0."""
        if self._config.objective != "kto":
            return 0.0
        assert data.mismatched is not None
        share = ranks.share(len(windows))
        mine = windows[share.start : share.stop]
        with ranks.together():
            moved = self._scores(1, data.mismatched, mine)
            moved = moved - self._references(data.mismatched, mine)
        moved = ranks.joined(moved, len(windows))
        n = Answers.in_windows(data.mismatched.part(np.asarray(windows, np.int64)), self._room).n
        return max(float(moved.sum(dtype=np.float64)) / n, 0.0)

    def _references(self, data: Dataset, windows: Windows) -> np.ndarray:
        """The reference's log-probabilities (n, room) float32; 0 without a reference."""
        if self._config.objective == "orpo":
            return np.zeros((len(windows), self._room), np.float32)
        for window in windows:
            if (id(data), int(window)) not in self._known:
                self._known[id(data), int(window)] = self._score(0, data, int(window))
        return self._stacked([self._known[id(data), int(window)] for window in windows])

    def _scores(self, which: int, data: Dataset, windows: Windows) -> np.ndarray:
        return self._stacked([self._score(which, data, int(window)) for window in windows])

    def _stacked(self, scores: Sequence[np.ndarray]) -> np.ndarray:
        return np.array(scores, np.float32).reshape(len(scores), self._room)

    def _score(self, which: int, data: Dataset, window: int) -> np.ndarray:
        return self._scorers[which].score(self.passes.other_programs[which], data, window)


def _rewards(batch: AnswerBatch, above: np.ndarray, kl: float, kind: str) -> Rewards:
    """above (S,): β times how far each answer is above the reference, and above the KL."""
    wanted, unwanted = batch.sign > 0, batch.sign < 0
    if kind == "kto":  # each on its side of the KL
        right = (above * batch.sign)[wanted | unwanted] > 0
    else:
        right = (above[0::2] > above[1::2])[wanted[0::2]]
    return Rewards(
        chosen_sum=float((above[wanted] + kl).sum(dtype=np.float64)),
        rejected_sum=float((above[unwanted] + kl).sum(dtype=np.float64)),
        n_chosen=int(wanted.sum()),
        n_rejected=int(unwanted.sum()),
        n_right=int(right.sum()),
        n_compared=right.size,
    )
