"""The losses of single rows: those that a model finds hardest and easiest are often bad rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyggml import heap
from pyggml.lora import Corpus
from pyggml.lora.data import Dataset, Documents, pack
from pyggml.lora.data.windows.units import Units, as_words, first_learned
from pyggml.model import Model

LEAST, MOST = 8, 64  # rows
_LEAST_CTX = 4  # of `perplexity`
_TOKENS = 16  # of a row that are shown


@dataclass(frozen=True, slots=True)
class RowLoss:
    """What is learned of a row, its start, and the mean loss of these tokens by each model."""

    text: str
    losses: tuple[float, ...]


def row_losses(models: Sequence[Model], corpus: Corpus, n_tokens: float = 0) -> list[RowLoss]:
    """Of some rows that are trained on, spread over all, the highest loss by the last model first;
    none in windows of fewer than four tokens.

    n_tokens: about how many tokens each model may read, of 8 to 64 rows
    """
    train = corpus.train
    units = Units.of(train)
    if not len(units) or train.ctx < _LEAST_CTX:
        return []
    which = units.spread(min(max(int(n_tokens / units.lengths.mean()), LEAST), MOST))
    trained = None if train.trained is None else train.trained.reshape(-1)
    where = units.starts[which], units.lengths[which]
    windows = pack(Documents(train.tokens.reshape(-1), *where, trained), train.ctx, whole=True)
    means = [_means(model, windows, len(which)) for model in models]
    decode = models[0].tokenizer.decode
    shown = (first_learned(*units.tokens(train, int(i)), _TOKENS) for i in which)
    texts = (as_words(decode(ids)) for ids in shown)
    each = zip(*means, strict=True)
    rows = [RowLoss(text, losses) for text, losses in zip(texts, each, strict=True)]
    return sorted(rows, key=lambda row: -np.nan_to_num(row.losses[-1], nan=np.inf))


def _means(model: Model, windows: Dataset, n: int) -> list[float]:
    """The mean loss of each of n documents in these windows."""
    from pyggml.lora.evaluate import perplexity  # the first step need not wait for it

    sums, counts = np.zeros(n), np.zeros(n)
    for window in perplexity(model, windows):
        scores = window.scores
        sums += np.bincount(scores.documents, scores.losses, n)
        counts += np.bincount(scores.documents, minlength=n)
    heap.give_back()  # the graphs, before those of another model
    return [float(x) for x in sums / np.maximum(counts, 1)]
