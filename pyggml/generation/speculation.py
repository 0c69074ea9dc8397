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

Nobody has to ask for the look-up. Every few tokens it reads what came, and says how much of that it
would have guessed; while that is little, a pass costs what it does without. Drafts begin where what
they save pays for the programs that they need, and last while they bring more tokens a second.

gain     how long a draft is worth its pass
drafts   where drafts come from
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
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
from pyggml.generation.sampling import ALIKE
from pyggml.model import Model

if TYPE_CHECKING:
    from pyggml.generation.completion import Completion, Piece

_NOTHING = Offer(0.0, 0)
_BEGUN = 4  # tokens of an answer, whose passes are measured
_PERIOD = 16  # tokens
_FEWEST = 4  # one of so many tokens was guessed right in a text that repeats itself
_REST = 1 / 64  # of the way back to FIRST_CHANCE, in a pass without a draft of the draft model


@dataclass(slots=True)
class _Guesses:
    """What is guessed of one answer.

    asked      whether its text is looked up as somebody asked for it, and not only by itself
    looks      whether its text is looked up
    look_up    over its prompt and what it has so far, of which n_seen tokens of the answer
    ends       of the answer's tokens, where it is looked anew whether guesses pay: enough of the
               last ones were guessed right, to afford a pass with a draft. Unasked they wait for it
    n_right    of its guesses, where that was looked at last
    chance     that a token of the draft model is accepted
    by_model   whether the draft that was fed is the draft model's
    """

    asked: bool
    looks: bool
    look_up: LookUp = field(default_factory=LookUp)
    n_seen: int = -1
    ends: int = _BEGUN
    pays: bool = False
    n_right: int = 0
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
        self._n_right = 0  # guesses that came true, drafted or not

    def guesses(self, completion: Completion) -> bool:
        """Whether tokens of an answer are guessed. None in a deterministic batch: how many depends
        on how long passes take, and not every product gives a token the bits that it has alone."""
        looks = self._model is not None or self._of(completion).looks
        return looks and completion.how.draft_max > 0 and not self.batch.deterministic

    def _of(self, completion: Completion) -> _Guesses:
        """What is guessed of an answer. Text is looked up without being asked for where that leaves
        every bit: not on a card, nor in a form, whose forced tokens go in passes of any length."""
        guess = self._of_answers.get(completion)
        if guess is None:
            how = completion.how
            asked = bool(how.ngram or completion.predicted)
            unasked = how.ngram is None and not how.has_form and _keeps_bits(self.batch.model)
            guess = self._of_answers[completion] = _Guesses(asked, asked or unasked)
        return guess

    def rests(self, completion: Completion) -> bool:
        """Whether the next pass of an answer has no draft, and nothing is to be learned of it."""
        guess = self._of(completion)
        unasked = self._model is None and not guess.asked and not guess.pays
        return unasked and _BEGUN <= len(completion.tokens) < guess.ends

    def release(self) -> None:
        """Free the draft model's cache."""
        if self._model is not None:
            self._model.release()

    def feed(
        self,
        pieces: Mapping[Slot, Tokens],
        answers: Mapping[Slot, Completion],
        every: Collection[Slot] = (),
        alone: Callable[[Tokens], np.ndarray] | None = None,
    ) -> dict[Slot, np.ndarray]:
        """As `Batch.feed`, with drafts behind the pieces of answers that are being written.

        pieces: of an answer, its tokens that are not fed yet. answers: those of which a token is
        sampled next; `verify` takes their logits, (n, n_vocab) after the last token of the piece
        and after each one of its draft. In a pass that reads prompts nothing is drafted.
        alone: feeds the only slot where nothing is drafted, with less done around a pass.
        """
        writes = len(answers) == len(pieces) and all(each.tokens for each in answers.values())
        guesses = self._answers_to_guess(pieces, answers) if writes else {}
        drafts = self._drafts(pieces, guesses) if guesses else {}
        fed = {s: [*ids, *drafts[s]] if s in drafts else ids for s, ids in pieces.items()}
        start = perf_counter()
        if alone is not None and not drafts:
            logits = {slot: alone(ids) for slot, ids in pieces.items()}
        else:
            logits = self.batch.feed(fed, {*every, *drafts})
        if guesses:
            self._costs.note(sum(map(len, fed.values())), perf_counter() - start)
        for slot in answers:
            if slot in drafts:
                logits[slot] = logits[slot][-1 - len(drafts[slot]) :]
            else:
                logits[slot] = logits[slot][-1:] if slot in every else logits[slot][None]
        return logits

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

    def _answers_to_guess(
        self, pieces: Mapping[Slot, Tokens], answers: Mapping[Slot, Completion]
    ) -> dict[Slot, Completion]:
        """The answers of which tokens are guessed in this pass; unasked, of one that is alone."""
        guesses = {slot: each for slot, each in answers.items() if self.guesses(each)}
        if len(pieces) == 1:
            return {slot: each for slot, each in guesses.items() if not self.rests(each)}
        return {s: each for s, each in guesses.items() if self._model or self._of(each).asked}

    def _drafts(
        self, pieces: Mapping[Slot, Tokens], answers: Mapping[Slot, Completion]
    ) -> dict[Slot, list[int]]:
        """Drafts of those slots in which one is worth it."""
        n_tokens = sum(map(len, pieces.values()))
        offers = {s: self._offer(s, pieces[s], each, n_tokens) for s, each in answers.items()}
        if not any(offer.most for offer in offers.values()):
            return {}
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

    def _offer(self, slot: Slot, piece: Tokens, completion: Completion, n_tokens: int) -> Offer:
        """What can be drafted of an answer, in a pass that has n_tokens anyway. What repeats itself
        is looked up, at no cost."""
        guess = self._of(completion)
        if guess.looks:
            self._look_up(guess, completion, [*slot.tokens, *piece] if guess.n_seen < 0 else ())
        may_look = guess.looks and (guess.asked or guess.pays)
        chance = guess.look_up.chance if may_look else 0.0
        guess.by_model = not chance and self._model is not None
        if not chance and not guess.by_model:
            return _NOTHING
        most = self._room(slot, len(piece), completion)
        if guess.by_model:
            assert self._model is not None
            return Offer(guess.chance, most, self._model.seconds)
        most = most if guess.asked else max(0, min(most, ALIKE - n_tokens))
        return Offer(chance, most, n_right=min(self._n_right, completion.n_left))

    def _look_up(self, guess: _Guesses, completion: Completion, prompt: Tokens) -> None:
        """Bring the look-up of an answer up to its last token. prompt: what it begins with."""
        look_up, n = guess.look_up, len(completion.tokens)
        if guess.n_seen < 0:
            look_up.extend([*completion.predicted[-MOST_SEEN:]])
            look_up.extend([*map(int, prompt[-MOST_SEEN:])])
            guess.n_right, guess.ends = look_up.n_right, n + _PERIOD
        else:
            look_up.extend(completion.tokens[guess.n_seen :])
        guess.n_seen = n
        if n >= guess.ends:
            n_right = look_up.n_right - guess.n_right
            repeats = n_right * _FEWEST >= n + _PERIOD - guess.ends
            self._n_right += n_right if repeats else 0
            n_saved = min(self._n_right, completion.n_left)
            guess.pays = repeats and self._costs.affords(2, 1, n_saved)
            guess.n_right, guess.ends = look_up.n_right, n + _PERIOD

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
        guess = self._of(completion)
        for i in range(min(n_right + 1, n_drafted) if guess.by_model else 0):
            guess.chance = chance_after(guess.chance, i < n_right)


def _keeps_bits(model: Model) -> bool:
    """Whether passes of up to ALIKE tokens give each one the bits that it has alone."""
    return model.batches and all(each.is_host for each in model.devices.backends)
