"""A model and its cache: tokens in, the logits of the last one out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from weakref import finalize

import numpy as np

from pyggml.generation.ahead import runs_ahead
from pyggml.generation.batch import Batch, Tokens
from pyggml.generation.drafts import check_goes_back
from pyggml.generation.memory import CacheType
from pyggml.generation.speculation import Speculator
from pyggml.graph.tensor import Tensor
from pyggml.model import Model

if TYPE_CHECKING:
    from pyggml.generation.completion import Completion, Piece


class Session:
    """One sequence, a batch of one slot: tokens in, logits of the last one out."""

    def __init__(
        self, model: Model, n_ctx: int, cache_type: CacheType = "f16", draft: Model | None = None
    ) -> None:
        """draft: a smaller model that guesses tokens of answers (pyggml.generation.speculation).

        Raises ConfigError if n_ctx is below 1, the type of keys and values does not fit, or a draft
        model is given and states cannot go back; ModelError for one with other tokens.
        """
        self._batch = Batch(model, 1, n_ctx, cache_type)
        self._slot = self._batch.open()
        finalize(self, self._batch.release).atexit = False
        self.speculator = Speculator(self._batch, draft)
        finalize(self, self.speculator.release).atexit = False

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
    def tokens(self) -> list[int]:
        """A copy of these."""
        return [*self._slot.tokens]

    @property
    def cache(self) -> tuple[Tensor, ...]:
        """Its rows of keys and values, and its state, of all blocks."""
        return self._batch.memory.cache.tensors

    @property
    def n_bytes(self) -> int:
        """The size of its cache."""
        return self._batch.memory.n_bytes

    def feed(self, tokens: Tokens) -> np.ndarray:
        """Append tokens to the context; returns the logits after the last, float32 (n_vocab,).

        Raises DataError if the tokens exceed the cache or are outside of the vocabulary.
        """
        return self._batch.feed_one(self._slot, tokens)

    def pieces(self, completion: Completion, tokens: Tokens) -> Iterator[Piece]:
        """The pieces of an answer that follow the tokens, until it ends or the context is full.

        Raises as `feed`, and ConfigError where tokens are to be guessed of a model with states.
        """
        guesses = self.speculator.guesses(completion)
        if guesses:
            check_goes_back(self.model)
        elif completion.needs_no_logits and runs_ahead(self.model):
            for token in self.greedy(tokens):
                yield completion.accept(token)
                if completion.finish is not None:
                    break
            return
        slot = self._slot
        while completion.finish is None:
            if not guesses or self.speculator.rests(completion):
                rows = self.feed(tokens)[None]
            else:
                of_slots = self.speculator.feed({slot: tokens}, {slot: completion}, (), self.feed)
                rows = of_slots[slot]
            is_full = self.n_past == self.n_ctx
            tokens = yield from self.speculator.verify(slot, completion, rows)
            if is_full:
                return

    def greedy(self, tokens: Tokens) -> Iterator[int]:
        """Append tokens, then one by one the likeliest that follow, as `Batch.greedy`."""
        return self._batch.greedy(self._slot, tokens, owner=self)

    def shift(self, n_keep: int = 0) -> int:
        """Drop half of the tokens after the first n_keep, as `Slot.shift`."""
        return self._slot.shift(n_keep)

    def truncate(self, n: int) -> None:
        """Forget all but the first n tokens, as `Slot.truncate`."""
        self._slot.truncate(n)
