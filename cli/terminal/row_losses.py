"""The losses of single rows: those that a model finds hardest and easiest are often bad rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.look.lens import token_table
from pyggml.lora import Corpus
from pyggml.lora.data.units import Units
from pyggml.model import Model

LEAST, MOST = 8, 64  # rows
_TOKENS = 16  # of a row that are shown


@dataclass(frozen=True, slots=True)
class RowLoss:
    """How a row begins, and the mean loss of its learned tokens by each model."""

    text: str
    losses: tuple[float, ...]


def row_losses(models: Sequence[Model], corpus: Corpus, n_tokens: float = 0) -> list[RowLoss]:
    """Of some rows that are trained on, spread over all, the highest loss by the last model first.

    n_tokens: about how many tokens each model may read, of 8 to 64 rows
    """
    train = corpus.train
    units = Units.of(train)
    n = int(n_tokens / max(units.lengths.mean(), 1)) if len(units) else 0
    found = []
    for i in units.spread(min(max(n, LEAST), MOST)):
        ids, learned = units.tokens(train, int(i))
        losses = tuple(float(token_table(model, ids, learned).loss) for model in models)
        text = " ".join(models[0].tokenizer.decode(ids[:_TOKENS]).split())
        found.append(RowLoss(text, losses))
    return sorted(found, key=lambda row: -np.nan_to_num(row.losses[-1], nan=np.inf))
