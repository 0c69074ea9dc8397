"""A model and its cache: tokens in, the logits of the last one out."""

from collections.abc import Iterator
from weakref import finalize

import numpy as np

from pyggml.generation.batch import Batch, Tokens
from pyggml.generation.memory import CacheType
from pyggml.model import Model


class Session:
    """One sequence, a batch of one slot: tokens in, logits of the last one out."""

    def __init__(self, model: Model, n_ctx: int, cache_type: CacheType = "f16") -> None:
        """Raises ConfigError if n_ctx is below 1 or the type of keys and values does not fit."""
        self._batch = Batch(model, 1, n_ctx, cache_type)
        self._slot = self._batch.open()
        finalize(self, self._batch.release).atexit = False

    @property
    def model(self) -> Model:
        return self._batch.model

    @property
    def n_ctx(self) -> int:
        """The most tokens that it takes."""
        return self._batch.n_ctx

    @property
    def n_past(self) -> int:
        """How many tokens it has."""
        return self._slot.n_past

    @property
    def n_bytes(self) -> int:
        """Of its cache."""
        return self._batch.memory.n_bytes

    def feed(self, tokens: Tokens) -> np.ndarray:
        """Append tokens to the context; returns the logits after the last, float32 (n_vocab,).

        Raises DataError if the tokens exceed the cache or are outside of the vocabulary.
        """
        return self._batch.feed_one(self._slot, tokens)

    def greedy(self, tokens: Tokens) -> Iterator[int]:
        """Append tokens, then one by one the likeliest that follow, as `Batch.greedy`."""
        return self._batch.greedy(self._slot, tokens, owner=self)

    def shift(self, n_keep: int = 0) -> int:
        """Drop half of the tokens after the first n_keep, as `Slot.shift`."""
        return self._slot.shift(n_keep)

    def truncate(self, n: int) -> None:
        """Forget all but the first n tokens, as `Slot.truncate`."""
        self._slot.truncate(n)
