"""Speculation: several tokens are guessed, and one pass of the model says which are right.

A pass of one token reads all weights, and one of three hardly takes longer. So a draft of what may
come is fed with the last token. Then each next token is sampled from its own logits as ever: where
that is the draft's, the logits after it are there already; the first that is not takes its place,
and the rest of the draft is forgotten.

So the answer is the one without drafts, token by token, with the same draws of its seed, whatever
is drafted and how much. It is the rule of Leviathan et al. 2023 and Chen et al. 2023, to accept x
with min(1, p(x) / q(x)) and else to draw from (p − q)+, where the draft is given and q(x) = 1: a
draw from p is x with p(x), and else one of p without x. A draft model chooses with the draws that
the answer will have, so that both tend to choose alike at any temperature.

gain     how long a draft is worth its pass
drafts   where drafts come from
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from pyggml.generation.batch import Batch, Slot, Tokens
from pyggml.generation.drafts import (
    FIRST_CHANCE,
    MOST_SEEN,
    DraftModel,
    LookUp,
    chance_after,
    check_goes_back,
    n_common,
)
from pyggml.generation.gain import Offer, PassCosts
from pyggml.generation.sampler import Sampler
from pyggml.model import Model

if TYPE_CHECKING:
    from pyggml.generation.completion import Completion, Piece

_REST = 1 / 64  # of the way back to FIRST_CHANCE, in a pass without a draft of the draft model


@dataclass(slots=True)
class _Guesses:
    """What is guessed of one answer.

    look_up    over its prompt and what it has so far, of which n_seen tokens of the answer
    chance     that a token of the draft model is accepted
    by_model   whether the draft that was fed is the draft model's
    """

    look_up: LookUp = field(default_factory=LookUp)
    n_seen: int = -1
    chance: float = FIRST_CHANCE
    by_model: bool = False


class Speculator:
    """Feeds the answers of a batch with drafts, where that is faster.

    n_drafted, n_accepted   tokens so far
    """

    def __init__(self, batch: Batch, draft: Model | None = None) -> None:
        """draft: a smaller model that drafts for all answers.

        Raises ConfigError for models with states, ModelError for a draft model with other tokens.
        """
        self.batch = batch
        self.n_drafted = self.n_accepted = 0
        self._costs = PassCosts()
        self._of_answers: WeakKeyDictionary[Completion, _Guesses] = WeakKeyDictionary()
        if draft is not None:
            check_goes_back(batch.model)
        self._model = None if draft is None else DraftModel(draft, batch)

    def guesses(self, completion: Completion) -> bool:
        """Whether tokens of an answer are guessed. None in a deterministic batch: how many depends
        on how long passes take, and not every product gives a token the bits that it has alone."""
        looks = _looks_up(completion) or self._model is not None
        return looks and completion.how.draft_max > 0 and not self.batch.deterministic

    def release(self) -> None:
        """Free the draft model's cache."""
        if self._model is not None:
            self._model.release()

    def feed(
        self,
        pieces: Mapping[Slot, Tokens],
        answers: Mapping[Slot, Completion],
        every: Collection[Slot] = (),
    ) -> dict[Slot, np.ndarray]:
        """As `Batch.feed`, with drafts behind the pieces of answers that are being written.

        pieces: of an answer, its tokens that are not fed yet. answers: those of which a token is
        sampled next; `verify` takes their logits, (n, n_vocab) after the last token of the piece
        and after each one of its draft. In a pass that reads prompts nothing is drafted.
        """
        writes = len(answers) == len(pieces) and all(each.tokens for each in answers.values())
        guesses = {slot: each for slot, each in answers.items() if writes and self.guesses(each)}
        drafts = self._drafts(pieces, guesses) if guesses else {}
        fed = {slot: [*ids, *drafts.get(slot, ())] for slot, ids in pieces.items()}
        start = perf_counter()
        logits = self.batch.feed(fed if drafts else pieces, {*every, *drafts})
        if guesses:
            self._costs.note(sum(map(len, fed.values())), perf_counter() - start)
        rows = {slot: -1 - len(drafts.get(slot, ())) for slot in answers}
        return logits | {
            slot: logits[slot][n:] if slot in drafts or slot in every else logits[slot][None]
            for slot, n in rows.items()
        }

    def verify(
        self, slot: Slot, completion: Completion, logits: np.ndarray
    ) -> Generator[Piece, None, list[int]]:
        """The pieces that follow, from the logits (n, n_vocab) after a draft of n − 1 tokens.

        Returns the tokens that are to be fed next. The slot forgets what was not accepted.
        """
        first = slot.n_past - len(logits) + 1
        draft, n_right = slot.tokens[first:], 0
        pending = list[int]()
        try:
            while not pending:
                n = len(completion.tokens)
                yield completion.take(logits[n_right])
                yield from completion.forced_pieces(self.batch.n_ctx - first - n_right - 1)
                if completion.finish is not None:
                    return []
                new = completion.tokens[n:]
                n_alike = n_common(new, draft[n_right:])
                n_right, pending = n_right + n_alike, new[n_alike:]
            return pending
        finally:
            if draft:
                self._note(completion, len(draft), n_right)
                if slot.is_open:
                    slot.truncate(first + n_right)

    # -- drafts -----------------------------------------------------------------------------

    def _drafts(
        self, pieces: Mapping[Slot, Tokens], answers: Mapping[Slot, Completion]
    ) -> dict[Slot, list[int]]:
        """Drafts of those slots in which one is worth it."""
        offers = {slot: self._offer(slot, pieces[slot], each) for slot, each in answers.items()}
        n_tokens = sum(map(len, pieces.values()))
        lengths = dict(zip(offers, self._costs.lengths(n_tokens, [*offers.values()]), strict=True))
        drafts = dict[Slot, list[int]]()
        jobs = dict[Slot, tuple[list[int], Sampler, int]]()
        for slot, n in lengths.items():
            guess = self._of_answers[answers[slot]]
            if not guess.by_model:
                drafts[slot] = guess.look_up.draft(n)
            elif n:
                jobs[slot] = [*slot.tokens, *pieces[slot]], answers[slot].guesser(), n
            else:
                guess.chance += _REST * (FIRST_CHANCE - guess.chance)
        if self._model is not None and jobs:
            drafts |= self._model.draft(jobs)
        drafts = {slot: answers[slot].in_form(ids) for slot, ids in drafts.items()}
        return {slot: ids for slot, ids in drafts.items() if ids}

    def _offer(self, slot: Slot, piece: Tokens, completion: Completion) -> Offer:
        """What can be drafted of an answer. What repeats itself is looked up, at no cost."""
        guess = self._of_answers.setdefault(completion, _Guesses())
        if _looks_up(completion):
            begun = guess.n_seen >= 0
            new = completion.tokens[guess.n_seen :] if begun else [*slot.tokens, *piece]
            guess.look_up.extend([] if begun else [*completion.predicted[-MOST_SEEN:]])
            guess.look_up.extend([*map(int, new[-MOST_SEEN:])])
            guess.n_seen = len(completion.tokens)
        most = self._room(slot, len(piece), completion)
        guess.by_model = not guess.look_up.chance and self._model is not None
        if guess.by_model:
            assert self._model is not None
            return Offer(guess.chance, most, self._model.seconds)
        return Offer(guess.look_up.chance, most if guess.look_up.chance else 0)

    def _room(self, slot: Slot, n: int, completion: Completion) -> int:
        """The most tokens of a draft behind n of a slot. None where a trace reads what is fed, and
        none with the rotary factors of a longer sequence."""
        if any(trace.patterns for trace in slot.model.traces):
            return 0
        end = (
            self.batch.n_ctx - 1 if slot.is_long else min(self.batch.n_ctx - 1, self.batch.n_short)
        )
        n_more, most = completion.n_left - 1, completion.how.draft_max
        return max(0, min(most, end - slot.n_past - n, n_more))

    def _note(self, completion: Completion, n_drafted: int, n_right: int) -> None:
        self.n_drafted += n_drafted
        self.n_accepted += n_right
        guess = self._of_answers.setdefault(completion, _Guesses())
        for i in range(min(n_right + 1, n_drafted) if guess.by_model else 0):
            guess.chance = chance_after(guess.chance, i < n_right)


def _looks_up(completion: Completion) -> bool:
    """Whether guesses come from the text so far, or from one that was predicted."""
    return completion.how.ngram or bool(completion.predicted)
