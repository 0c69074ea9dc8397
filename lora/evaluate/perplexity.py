"""Perplexity: of a text as llama.cpp's `perplexity` computes it, of documents as validation does.

A text is cut into chunks of n_ctx tokens; the first of each becomes BOS where the tokenizer adds
one. Only the second half of a chunk is scored, positions n_ctx/2 … n_ctx − 2, each by its next
token, so that every scored token has some context.

Windows of documents are scored wherever the next token is of the same document, and learned: of
chats the answers alone.

perplexity = exp(mean of −log p),  error = perplexity · √((mean of squares − mean²) / (n − 1))

Token accuracy is the share of the scored tokens that the model thought the likeliest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np

from pyggml.errors import ConfigError, DataError
from pyggml.lora.data import Dataset
from pyggml.lora.evaluate.scorer import Predictions, Scorer
from pyggml.model import Model
from pyggml.models.texts import fill


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """n scored tokens: −log p (n,) float64; whether each was the likeliest (n,) bool; the number of
    its document, or of its chunk of a text (n,) int64."""

    losses: np.ndarray
    right: np.ndarray
    documents: np.ndarray

    @staticmethod
    def join(parts: Sequence[TokenScores]) -> TokenScores:
        """The tokens of all parts, one after the other."""
        return TokenScores(
            np.concatenate([p.losses for p in parts]),
            np.concatenate([p.right for p in parts]),
            np.concatenate([p.documents for p in parts]),
        )


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The perplexity of the first `chunk` of `n_chunks` chunks, and its standard error.

    n_tokens, n_right   tokens scored so far, and those that were the likeliest
    scores              of this chunk alone
    """

    chunk: int
    n_chunks: int
    n_tokens: int
    n_right: int
    value: float
    error: float
    scores: TokenScores


def perplexity(
    model: Model,
    source: str | Dataset,
    n_ctx: int = 512,
    parse_special: bool = False,
    limit: int | None = None,
) -> Iterator[Perplexity]:
    """The perplexity of all chunks so far, after each of them. A window of a Dataset is a chunk.

    n_ctx          tokens of a chunk of text
    parse_special  whether the name of a control token in a text is that token
    limit          reads the first chunks alone

    Raises ConfigError for a context that the model does not have, and DataError for a text that is
    shorter than two contexts, as llama.cpp does.
    """
    n_ctx = source.ctx if isinstance(source, Dataset) else n_ctx
    if not 4 <= n_ctx <= model.config.n_ctx:
        fault = f"is {n_ctx}, wanted 4 to the model's {model.config.n_ctx}"
        raise ConfigError([("n_ctx", fault)])
    if isinstance(source, Dataset):
        model.check_tokens(source.tokens.reshape(-1))
        source = replace(source.part(slice(limit)), lengths=None)
        n_chunks, chunk_scores = len(source), _of_windows(model, source)
    else:
        ids = model.tokenizer.encode(source, parse_special=parse_special)
        chunks = chunks_of(model, ids, n_ctx)[:limit]
        n_chunks, chunk_scores = len(chunks), _of_text(model, chunks)
    total, squares, n, n_right = 0.0, 0.0, 0, 0
    for chunk, scores in enumerate(chunk_scores, 1):
        total += float(scores.losses.sum())
        squares += float((scores.losses**2).sum())
        n += len(scores.losses)
        n_right += int(scores.right.sum())
        mean, value = total / n, _exp(total / n)
        error = value * sqrt(max(squares / n - mean**2, 0.0) / max(n - 1, 1))
        yield Perplexity(chunk, n_chunks, n, n_right, value, error, scores)


def chunks_of(model: Model, tokens: Sequence[int], n_ctx: int) -> np.ndarray:
    """(n, n_ctx) int32: a text's whole chunks."""
    ids = model.check_tokens(tokens or [0])
    n_chunks = len(ids) // n_ctx
    if n_chunks < 2:
        raise DataError(
            f"the text has {len(ids)} tokens, wanted at least {2 * n_ctx}, two contexts of {n_ctx}"
        )
    return ids[: n_chunks * n_ctx].reshape(n_chunks, n_ctx)


def _of_text(model: Model, chunks: np.ndarray) -> Iterator[TokenScores]:
    """The scores of each chunk's second half."""
    n_ctx = chunks.shape[1]
    bos = model.tokenizer.bos_id if model.tokenizer.add_bos else None
    positions = np.arange(n_ctx // 2, n_ctx - 1)
    scorer = Scorer(model, n_ctx, len(positions))
    for number, tokens in enumerate(chunks):
        fill(scorer.inputs, tokens if bos is None else np.concatenate([[bos], tokens[1:]]))
        yield _scores(
            scorer.score(positions, tokens[positions + 1]), np.full(len(positions), number)
        )


def _of_windows(model: Model, data: Dataset) -> Iterator[TokenScores]:
    """The scores of each window's targets."""
    scorer = Scorer(model, data.ctx, data.ctx)
    for number, batch in enumerate(data.batches(range(len(data)), 1)):
        batch.fill(scorer.inputs)
        positions = np.flatnonzero(batch.weights)
        predictions = scorer.score(positions, batch.targets[positions])
        yield _scores(predictions, data.documents[number][positions])


def _scores(predictions: Predictions, documents: np.ndarray) -> TokenScores:
    return TokenScores(predictions.losses, predictions.right, documents.astype(np.int64))


def _exp(x: float) -> float:
    """e^x, infinite where that is more than a float holds."""
    with np.errstate(over="ignore"):
        return float(np.exp(np.float64(x)))
