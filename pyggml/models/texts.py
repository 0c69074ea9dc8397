"""Texts as a model takes them: token ids, of one text or of several, → the inputs of a pass."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np

from pyggml.errors import DataError
from pyggml.graph.arrays import write
from pyggml.models.batch_rows import BatchRows
from pyggml.models.config import ModelConfig
from pyggml.models.net import Inputs

Ids = Sequence[int] | np.ndarray  # a text's tokens


def inputs_of(tokens: Ids | Sequence[Ids], config: ModelConfig) -> Inputs:
    """The filled inputs of a text from its start, or of several in one pass. DataError for tokens
    that make none, and for more than the model's context."""
    if not is_several(tokens):
        if isinstance(tokens, np.ndarray) and tokens.ndim == 2:  # a list would be several
            raise DataError("tokens: a matrix, wanted one row of integers, or a list of rows")
        ids = check_text(tokens, config, "tokens")
        inputs = Inputs.empty(len(ids), causal=config.causal)
        fill(inputs, ids)
        return inputs
    texts = [check_text(text, config, f"tokens[{i}]") for i, text in enumerate(tokens)]
    batch = BatchRows(tuple(map(len, texts)))
    n = sum(batch.lengths)
    inputs = Inputs.empty(n, max(batch.lengths), causal=config.causal)
    fill(inputs, *texts)
    return replace(inputs, batch=batch)


def check_text(tokens: Any, config: ModelConfig, name: str) -> np.ndarray:
    """Token ids as int32. DataError, about what has this name, for none, for one that is outside
    the vocabulary, and for more than the model's context."""
    ids = check_ids(tokens, config.n_vocab, name)
    if len(ids) > config.n_ctx:
        of = "" if name == "tokens" else f"{name}: "
        raise DataError(
            f"{of}{len(ids)} tokens, wanted at most the {config.n_ctx} of the model's context"
        )
    return ids


def check_ids(tokens: Ids, n_vocab: int, name: str) -> np.ndarray:
    """Token ids as int32, every one of them inside the vocabulary. name: for a DataError."""
    try:
        ids = np.asarray(tokens)
    except ValueError:  # rows of unlike length
        raise DataError(f"{name}: lists of unlike length, wanted one row of integers") from None
    if ids.size == 0:
        raise DataError(f"{name}: empty, wanted at least one token")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(f"{name}: {ids.dtype} of shape {ids.shape}, wanted one row of integers")
    if ids.astype(np.uint64).max() >= n_vocab:  # as those below 0 are, then
        raise DataError(f"{name}: ids from {ids.min()} to {ids.max()}, wanted 0 to {n_vocab - 1}")
    return ids.astype(np.int32)


def is_several(tokens: Ids | Sequence[Ids]) -> TypeGuard[Sequence[Ids]]:
    """Whether these are several texts: a list of rows of tokens, and not one row."""
    return (
        isinstance(tokens, list | tuple)
        and len(tokens) > 0
        and all(isinstance(text, Sequence | np.ndarray) for text in tokens)
    )


def fill(inputs: Inputs, *texts: np.ndarray) -> None:
    """Texts, one after another, each from its start."""
    lengths = [len(ids) for ids in texts]
    positions = np.concatenate([np.arange(n) for n in lengths])
    first = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    write(inputs.tokens, np.concatenate(texts))
    write(inputs.positions, positions)
    span = np.stack([first, first + positions + 1], axis=1)
    write(inputs.span, span if inputs.causal else both_ways(span))
    write(inputs.length, np.repeat(lengths, lengths))


def both_ways(span: np.ndarray) -> np.ndarray:
    """The spans (T, 2) of causal texts as those of tokens that see all of their text."""
    starts, text = np.unique(span[:, 0], return_inverse=True)
    ends = np.zeros(len(starts), span.dtype)
    np.maximum.at(ends, text, span[:, 1])
    return np.stack([span[:, 0], ends[text]], axis=1)
