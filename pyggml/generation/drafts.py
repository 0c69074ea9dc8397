"""Drafts: guesses of the next tokens, from the text so far or from a smaller model."""

from collections.abc import Mapping, Sequence
from time import perf_counter

import numpy as np

from pyggml.errors import ConfigError
from pyggml.generation.batch import Batch, Slot
from pyggml.generation.sampler import Sampler
from pyggml.model import Model
from pyggml.tokenizer.same_tokens import check_same_tokens

ORDERS = (4, 3, 2)  # tokens of the n-grams that are looked up, the longest first
MOST_SEEN = 8192  # last tokens of a prompt that are looked through
_AT_ONCE = 256  # tokens that a draft model reads in one step, so that nobody waits for long
_WEIGHT = 1 / 16  # of the newest
FIRST_CHANCE = 0.6


def chance_after(chance: float, accepted: bool) -> float:
    """The mean of what became of guesses, lately, after one more."""
    return chance + _WEIGHT * (accepted - chance)


class LookUp:
    """Prompt look-up: after the last tokens comes what came after them before (Saxena 2023).

    chance    that its next guess is right: how often those by n-grams of this order were, lately
    n_right   guesses that were
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # where that which followed an n-gram begins
        self._chances = dict.fromkeys(ORDERS, FIRST_CHANCE)
        self.n_right = 0
        self._order, self._at = 0, 0  # of the n-gram that was there before; 0: none was

    @property
    def chance(self) -> float:
        return self._chances.get(self._order, 0.0)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; each one shows whether it was guessed, drafted or not."""
        for token in tokens:
            if self._order:
                accepted = self._tokens[self._at] == token
                self.n_right += accepted
                self._chances[self._order] = chance_after(self.chance, accepted)
            self._tokens.append(token)
            self._order = 0
            for order in (n for n in ORDERS if n <= len(self._tokens)):
                gram = tuple(self._tokens[-order:])
                if not self._order and gram in self._after:
                    self._order, self._at = order, self._after[gram]
                self._after[gram] = len(self._tokens)

    def draft(self, n: int) -> list[int]:
        """The n tokens that come next if all goes as before; without an n-gram none."""
        if not self._order:
            return []
        period = len(self._tokens) - self._at
        return [self._tokens[self._at + i % period] for i in range(n)]


class DraftModel:
    """A smaller model that writes guesses: a sequence of its own for each slot of a batch."""

    def __init__(self, model: Model, batch: Batch) -> None:
        """Raises ModelError for a model with other tokens, ConfigError for one with states."""
        check_goes_back(model)
        check_same_tokens(model.file, batch.model.file)
        n_ctx = min(batch.n_ctx, model.config.n_ctx)
        self._batch = Batch(model, len(batch.slots), n_ctx)
        self._slots = [self._batch.open() for _ in batch.slots]
        self._n_vocab = batch.model.config.n_vocab
        self.seconds = 0.0  # of a step
        self._n_steps = 0

    def release(self) -> None:
        self._batch.release()

    def draft(self, jobs: Mapping[Slot, tuple[list[int], Sampler, int]]) -> dict[Slot, list[int]]:
        """Up to so many tokens after those of each slot, sampled with its sampler.

        None of one that is read yet, or that this model cannot read.
        """
        drafts, pieces = dict[Slot, list[int]](), dict[Slot, list[int]]()
        for slot, (tokens, _, n) in jobs.items():
            piece = self._piece(self._slots[slot.number], tokens, n)
            if len(piece) > _AT_ONCE:
                self._batch.feed({self._slots[slot.number]: piece[:_AT_ONCE]})
            elif piece:
                drafts[slot], pieces[slot] = [], piece
        while pieces:
            start = perf_counter()
            logits = self._batch.feed({self._slots[s.number]: ids for s, ids in pieces.items()})
            for slot in pieces:
                z = np.full(self._n_vocab, -np.inf, np.float32)
                own = logits[self._slots[slot.number]][: len(z)]
                z[: len(own)] = own
                drafts[slot].append(jobs[slot][1](z))
            self._note(perf_counter() - start)
            pieces = {slot: ids[-1:] for slot, ids in drafts.items() if len(ids) < jobs[slot][2]}
        return drafts

    def _piece(self, own: Slot, tokens: list[int], n: int) -> list[int]:
        """The tokens to be fed, after those that are forgotten; none if it cannot read them."""
        fits = len(tokens) + n <= self._batch.n_ctx
        if not fits or n < 1 or max(tokens[-_AT_ONCE:]) >= self._batch.model.config.n_vocab:
            return []
        n_same = min(n_common(own.tokens, tokens), len(tokens) - 1)
        if n_same < own.n_past:
            own.truncate(n_same)
        return tokens[n_same:]

    def _note(self, seconds: float) -> None:
        """The first steps bind programs."""
        self._n_steps += 1
        if self._n_steps > 2:
            self.seconds += _WEIGHT * (seconds - self.seconds) if self.seconds else seconds


def n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens are equal, quickly if only some of the last are not."""
    n = min(len(a), len(b))
    start = max(0, n - _AT_ONCE)
    start = start if a[:start] == b[:start] else 0
    unlike = (i for i in range(start, n) if a[i] != b[i])
    return next(unlike, n)


def check_goes_back(model: Model) -> None:
    """ConfigError for a model that cannot forget its last tokens."""
    if not model.batches:
        raise ConfigError(
            f"speculation: {model.config.architecture} has states, which cannot go back to before "
            "a draft: wanted a model of attention alone"
        )
