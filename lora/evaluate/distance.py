"""How far models are from an original on the same tokens, and how much of the way a third one went.

KL(original ‖ model) = Σ p · (log p − log q) over the vocabulary, at each scored position.

Tokens of one document, or of one window of a single text, count as one observation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np

from pyggml.look.intervals import Interval, Z, mean
from pyggml.lora.data import Dataset
from pyggml.lora.evaluate.scorer import Scorer, check_losses
from pyggml.model import Model


@dataclass(frozen=True, slots=True, eq=False)
class Distance:
    """A model on n scored tokens: −log p and KL from the original, (n,) float64 each; the number of
    what each token belongs to, (n,) int64."""

    losses: np.ndarray
    divergences: np.ndarray
    clusters: np.ndarray

    @property
    def perplexity(self) -> Interval:
        """exp of the mean loss."""
        loss = mean(self.losses, self.clusters)
        return Interval(*(float(np.exp(x)) for x in (loss.value, loss.low, loss.high)))

    @property
    def divergence(self) -> Interval:
        """The mean KL, in nats a token."""
        return mean(self.divergences, self.clusters)


def distances(models: Sequence[Model], data: Dataset) -> list[Distance]:
    """Of each model, from the first one, on the learned tokens.

    Raises NotFiniteError for what makes no numbers.
    """
    data = replace(data, lengths=None)  # whole windows, in their order
    scorers = [Scorer(model, data.ctx, data.ctx) for model in models]
    parts: list[np.ndarray] = []  # (models, 2, n) each
    clusters: list[np.ndarray] = []
    for i, batch in enumerate(data.batches(range(len(data)), 1)):
        positions = np.flatnonzero(batch.weights)
        for scorer in scorers:
            batch.fill(scorer.inputs)
        parts.append(_of_window(scorers, positions, batch.targets[positions]))
        numbers = data.documents[i][positions].astype(np.int64)
        clusters.append(np.stack([numbers, np.full(len(positions), i)]))
    whole, (documents, numbers) = np.concatenate(parts, 2), np.concatenate(clusters, 1)
    own = documents if len(np.unique(documents)) > 1 else numbers
    return [Distance(losses, divergences, own) for losses, divergences in whole]


def _of_window(scorers: Sequence[Scorer], positions: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Losses and divergences (models, 2, n) of the tokens at these positions."""
    distances = np.empty((len(scorers), 2, len(positions)))
    for logits in zip(*(s.logits(positions) for s in scorers), strict=True):
        scored, original = logits[0][0], _log_softmax(logits[0][1])
        probabilities = np.exp(original)
        for of_model, (_, numbers) in zip(distances, logits, strict=True):
            each = _log_softmax(numbers)
            of_model[0, scored] = -np.take_along_axis(each, targets[scored][:, None], 1)[:, 0]
            of_model[1, scored] = np.einsum("tv,tv->t", probabilities, original - each)
            check_losses(of_model[0, scored])
    return distances


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64, like logits."""
    with np.errstate(invalid="ignore"):  # inf − inf is NaN, which no loss may be
        above = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return above - np.log(np.exp(above).sum(axis=1, keepdims=True))


def closed(original: Distance, quantised: Distance, healed: Distance) -> Interval:
    """The share of the gap in perplexity between the first two that the third has closed; its
    interval by the jackknife over clusters. NaN without a gap."""
    _, of = np.unique(original.clusters, return_inverse=True)
    n = np.bincount(of).astype(np.float64)
    sums = [np.bincount(of, each.losses) for each in (original, quantised, healed)]
    all_of_it = _share(*(s.sum() / n.sum() for s in sums))
    if len(n) < 2:
        return Interval(all_of_it, -np.inf, np.inf)
    left_out = [(s.sum() - s) / (n.sum() - n) for s in sums]  # mean losses without each in turn
    without = np.array([_share(*row) for row in zip(*left_out, strict=True)])
    margin = Z * sqrt((len(n) - 1) / len(n) * float(((without - without.mean()) ** 2).sum()))
    return Interval(all_of_it, all_of_it - margin, all_of_it + margin)


def _share(original: float, quantised: float, healed: float) -> float:
    """Of the gap that is closed; the arguments are mean losses."""
    o, q, h = np.exp([original, quantised, healed])
    return float((q - h) / (q - o)) if q != o else float("nan")
