"""Perplexity as llama.cpp's `perplexity` computes it.

The text is cut into chunks of n_ctx tokens; the first of each becomes BOS where the tokenizer adds
one. Only the second half of a chunk is scored, positions n_ctx/2 … n_ctx − 2, each by its next
token, so that every scored token has some context.

perplexity = exp(mean of −log p),  error = perplexity · √((mean of squares − mean²) / (n − 1))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt

import numpy as np

from pyggml.dtypes import I32
from pyggml.errors import ConfigError, DataError
from pyggml.model import Model, fill
from pyggml.models import Inputs, Net
from pyggml.ops import get_rows
from pyggml.ops.head import chunk_rows
from pyggml.ops.loss import cross_entropies
from pyggml.tensor import leaf, zeros


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The perplexity over the first `chunk` of `n_chunks` chunks, and its standard error."""

    chunk: int
    n_chunks: int
    n_tokens: int  # scored
    value: float
    error: float


def perplexity(model: Model, text: str, n_ctx: int = 512) -> Iterator[Perplexity]:
    """The running value after every chunk; the last one is the text's perplexity.

    Raises ConfigError for a context that the model does not have, and DataError for a text that is
    shorter than two contexts, as llama.cpp does.
    """
    if not 4 <= n_ctx <= model.config.n_ctx:
        raise ConfigError(f"n_ctx is {n_ctx}, wanted 4 to the model's {model.config.n_ctx}")
    ids = model.checked(model.tokenizer.encode(text) or [0])
    n_chunks = len(ids) // n_ctx
    if n_chunks < 2:
        raise DataError(
            f"the text has {len(ids)} tokens, wanted at least {2 * n_ctx}, two contexts of {n_ctx}"
        )
    scorer, total, squares, n = _Scorer(model, n_ctx), 0.0, 0.0, 0
    for chunk, tokens in enumerate(ids[: n_chunks * n_ctx].reshape(n_chunks, n_ctx), 1):
        losses = scorer(tokens)
        total += float(losses.sum())
        squares += float((losses**2).sum())
        n += len(losses)
        yield Perplexity(chunk, n_chunks, n, _exp(total / n), _error(total / n, squares / n, n))


def _exp(x: float) -> float:
    """e^x, infinite where that is more than a float holds."""
    with np.errstate(over="ignore"):
        return float(np.exp(np.float64(x)))


def _error(mean: float, mean_square: float, n: int) -> float:
    return _exp(mean) * sqrt(max(mean_square - mean**2, 0.0) / max(n - 1, 1))


class _Scorer:
    """Hidden states of a whole chunk in one graph, logits of a few of its positions in another."""

    def __init__(self, model: Model, n_ctx: int) -> None:
        parts = model.parts
        self.bos = model.tokenizer.bos_id if model.tokenizer.add_bos else None
        self.inputs = Inputs.empty(n_ctx)
        net = Net(parts.weights, self.inputs, model.adapters)
        hidden = parts.decoder.hidden(net)
        self.forward, _ = model.program(hidden)
        assert hidden.data is not None
        n_rows = chunk_rows(n_ctx - n_ctx // 2 - 1, parts.config.n_vocab)
        self.rows = zeros((n_rows,), I32, "scored rows")
        self.logits = parts.decoder.logits(net, get_rows(leaf(hidden.data), self.rows))
        self.head, _ = model.program(self.logits)

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """−log p of each scored token, float64 (n_ctx − n_ctx // 2 − 1,)."""
        fill(self.inputs, tokens)
        assert self.inputs.tokens.data is not None and self.rows.data is not None
        if self.bos is not None:
            self.inputs.tokens.data[0] = self.bos
        self.forward()
        positions = np.arange(len(tokens) // 2, len(tokens) - 1)
        losses = []
        for first in range(0, len(positions), len(self.rows.data)):
            some = positions[first : first + len(self.rows.data)]
            self.rows.data[: len(some)] = some
            self.head()
            assert self.logits.data is not None
            losses.append(cross_entropies(self.logits.data[: len(some)], tokens[some + 1]))
        return np.concatenate(losses)
