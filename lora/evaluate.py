"""Perplexity: of a text as llama.cpp's `perplexity` computes it, of documents as validation does.

A text is cut into chunks of n_ctx tokens; the first of each becomes BOS where the tokenizer adds
one. Only the second half of a chunk is scored, positions n_ctx/2 … n_ctx − 2, each by its next
token, so that every scored token has some context.

Windows of documents are scored wherever the next token is of the same document.

perplexity = exp(mean of −log p),  error = perplexity · √((mean of squares − mean²) / (n − 1))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np

from pyggml.backends import write
from pyggml.dtypes import F32, I32
from pyggml.errors import ConfigError, DataError
from pyggml.lora.data import Batch, Dataset
from pyggml.model import Model, fill
from pyggml.models import Inputs, Net
from pyggml.ops import get_rows
from pyggml.ops.head import chunk_rows
from pyggml.ops.loss import cross_entropies
from pyggml.tensor import zeros


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The perplexity of the first `chunk` of `n_chunks` chunks, and its standard error."""

    chunk: int
    n_chunks: int
    n_tokens: int  # scored
    value: float
    error: float


def perplexity(
    model: Model, source: str | Dataset, n_ctx: int = 512, parse_special: bool = False
) -> Iterator[Perplexity]:
    """The running value after every chunk (a window of a Dataset); the last one is that of all.

    n_ctx, parse_special: tokens of a chunk of text, and whether control tokens written in it are
    those tokens; a Dataset has settled both. Raises ConfigError for a context that the model does
    not have, and DataError for a text that is shorter than two contexts, as llama.cpp does.
    """
    n_ctx = source.ctx if isinstance(source, Dataset) else n_ctx
    if not 4 <= n_ctx <= model.config.n_ctx:
        fault = f"is {n_ctx}, wanted 4 to the model's {model.config.n_ctx}"
        raise ConfigError([("n_ctx", fault)])
    if isinstance(source, Dataset):
        model.checked(source.tokens.reshape(-1))
        source = replace(source, lengths=None)
        n_chunks, windows = len(source), _Scorer(model, n_ctx, n_ctx)
        found = (windows.window(b) for b in source.batches(range(n_chunks), 1))
    else:
        chunks = _chunks(model, model.tokenizer.encode(source, parse_special=parse_special), n_ctx)
        half = _Scorer(model, n_ctx, n_ctx - n_ctx // 2 - 1)
        n_chunks, found = len(chunks), (half.text(tokens) for tokens in chunks)
    total, squares, n = 0.0, 0.0, 0
    for chunk, losses in enumerate(found, 1):
        total += float(losses.sum())
        squares += float((losses**2).sum())
        n += len(losses)
        yield Perplexity(chunk, n_chunks, n, _exp(total / n), _error(total / n, squares / n, n))


def _chunks(model: Model, tokens: Sequence[int], n_ctx: int) -> np.ndarray:
    """(n, n_ctx) int32: a text's whole chunks."""
    ids = model.checked(tokens or [0])
    n_chunks = len(ids) // n_ctx
    if n_chunks < 2:
        raise DataError(
            f"the text has {len(ids)} tokens, wanted at least {2 * n_ctx}, two contexts of {n_ctx}"
        )
    return ids[: n_chunks * n_ctx].reshape(n_chunks, n_ctx)


def _exp(x: float) -> float:
    """e^x, infinite where that is more than a float holds."""
    with np.errstate(over="ignore"):
        return float(np.exp(np.float64(x)))


def _error(mean: float, mean_square: float, n: int) -> float:
    return _exp(mean) * sqrt(max(mean_square - mean**2, 0.0) / max(n - 1, 1))


class _Scorer:
    """Two graphs: the hidden states of a whole chunk, and the logits of a few of its positions."""

    def __init__(self, model: Model, n_ctx: int, n_scored: int) -> None:
        """n_scored: most positions of a chunk that are scored."""
        parts = model.parts
        self.bos = model.tokenizer.bos_id if model.tokenizer.add_bos else None
        self.inputs = Inputs.empty(n_ctx)
        net = Net(parts.weights, self.inputs, model.adapters)
        hidden = parts.decoder.hidden(net)
        self.forward = model.program(hidden)
        self.hidden, self.found = zeros(hidden.shape, F32, "hidden"), hidden
        n_rows = chunk_rows(n_scored, parts.config.n_vocab)
        self.rows = zeros((n_rows,), I32, "scored rows")
        self.logits = parts.decoder.logits(net, get_rows(self.hidden, self.rows))
        self.head = model.program(self.logits)

    def text(self, tokens: np.ndarray) -> np.ndarray:
        """−log p of each scored token of a chunk of text, float64."""
        begun = tokens if self.bos is None else np.concatenate([[self.bos], tokens[1:]])
        fill(self.inputs, begun)
        positions = np.arange(len(tokens) // 2, len(tokens) - 1)
        return self._losses(positions, tokens[positions + 1])

    def window(self, batch: Batch) -> np.ndarray:
        """−log p of each target of a window, float64."""
        pairs = (
            (self.inputs.tokens, batch.tokens),
            (self.inputs.positions, batch.positions),
            (self.inputs.span, batch.span),
        )
        for t, values in pairs:
            write(t, values)
        positions = np.flatnonzero(batch.weights)
        return self._losses(positions, batch.targets[positions])

    def _losses(self, positions: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """−log p of these targets after these positions of the chunk."""
        self.forward()
        write(self.hidden, self.forward.read(self.found))
        (n_rows,), losses = self.rows.shape, []
        for first in range(0, len(positions), n_rows):
            some = positions[first : first + n_rows]
            write(self.rows, np.resize(some, n_rows))
            self.head()
            wanted = targets[first : first + len(some)]
            losses.append(cross_entropies(self.head.read(self.logits)[: len(some)], wanted))
        return np.concatenate(losses)
