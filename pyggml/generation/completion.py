"""An answer as it is made: logits in, pieces of text out, until something ends it.

`Completion` is one sequence's part of a generation; whoever computes the logits drives it:

    completion = Completion(tokenizer, how, prompt, n_tokens)
    logits = session.feed(prompt)
    while (piece := completion.take(logits)).finish is None:
        show(piece.text)
        logits = session.feed([piece.token])

An answer in a form may have tokens without a choice: `forced_pieces` gives their pieces after each.
`complete` is this loop over a session of its own, `generate` its tokens alone.
"""

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from pyggml.errors import ConfigError
from pyggml.generation.batch import Tokens, check_shift
from pyggml.generation.memory import CacheType
from pyggml.generation.sampler import Sampler, logprobs
from pyggml.generation.sampling import Sampling
from pyggml.generation.session import Session
from pyggml.generation.stops import StopStrings
from pyggml.model import Model
from pyggml.tokenizer import Tokenizer


class Finish(StrEnum):
    """Why an answer ended."""

    STOP_TOKEN = "stop token"  # one that ends a generation, such as <|im_end|>
    STOP_STRING = "stop string"  # one of Sampling.stop
    FORM = "form complete"  # nothing may follow in the form of Sampling
    LENGTH = "length"  # n_tokens were made
    CONTEXT = "context full"  # no room for another

    @property
    def reason(self) -> str:
        """The OpenAI API's word for it."""
        return "length" if self in (Finish.LENGTH, Finish.CONTEXT) else "stop"


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of an answer, and the text that it completes.

    text       what can be shown now: may be empty, or longer than the token. Text waits while it
               may be a part of a character or of a stop string
    token      the sampled id; not part of the answer if it is a stop token
    finish     why this token is the last one, or None
    logprob    log-probability of the token in softmax(the model's logits), at temperature 1 and
               without biases and penalties; None unless Sampling.logprobs is given
    likeliest  (id, log-probability) of the Sampling.logprobs likeliest tokens, downwards
    """

    text: str
    token: int
    finish: Finish | None = None
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


class Completion:
    """One answer: samples its tokens, turns them into text, and says when and why it ends.

    tokens   the ids of the answer so far, without a stop token
    finish   why it ended, or None
    how      the settings, with the seed in use
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        how: Sampling,
        prompt: Sequence[int] | np.ndarray = (),
        n_tokens: int | None = None,
        n_ctx: int | None = None,
        shown: Collection[int] = (),
        predicted: Sequence[int] = (),
    ) -> None:
        """n_tokens: the most of the answer; n_ctx: of prompt and answer together; None: any number.
        shown: control tokens whose names are part of the text. predicted: tokens that the answer
        may have, which are guessed where they fit (pyggml.generation.speculation).

        Raises ConfigError for counts out of range, and a logit_bias of no token.
        """
        if n_tokens is not None and n_tokens < 0:
            raise ConfigError([("n_tokens", f"is {n_tokens}, wanted 0 or more")])
        self.tokens: list[int] = []
        self.predicted = predicted
        self._n_tokens, self._room = n_tokens, None if n_ctx is None else n_ctx - len(prompt)
        self._tokenizer, self._sampler = tokenizer, Sampler(how, tokenizer, prompt)
        self._characters, self._stops = tokenizer.stream(shown), StopStrings(how.stop)
        self.how, self.finish = self._sampler.how, self._finish(ends=False)

    @property
    def needs_no_logits(self) -> bool:
        """Whether each token is the likeliest, and nothing is told of the others."""
        return self._sampler.is_greedy and self.how.logprobs is None

    @property
    def n_left(self) -> int:
        """The most tokens that may come."""
        ends = (end for end in (self._n_tokens, self._room) if end is not None)
        return min(ends, default=sys.maxsize) - len(self.tokens)

    def guesser(self) -> Sampler:
        """What samples the next tokens as this answer will, from other logits."""
        return self._sampler.fork()

    def in_form(self, tokens: list[int]) -> list[int]:
        """The first tokens that the answer's form lets come next."""
        form = self._sampler.form
        return tokens if form is None else tokens[: form.n_fitting(tokens)]

    def take(self, logits: np.ndarray) -> Piece:
        """Sample the next token from the logits (n_vocab,) after prompt and `tokens`.

        Raises DataError if the greatest logit is NaN or infinite.
        """
        token = self._sampler(logits)
        n = self.how.logprobs
        told = (None, ()) if n is None else logprobs(logits, token, n)
        return self._piece(token, *told)

    def accept(self, token: int) -> Piece:
        """The piece of a token that was not sampled here, of an answer that `needs_no_logits`."""
        self._sampler.accept([token])
        return self._piece(token)

    def forced_pieces(self, room: int) -> Iterator[Piece]:
        """The pieces of tokens that the answer's form leaves no choice of, where nothing is to be
        told of them. room: the most that there is place for."""
        form = self._sampler.form
        if form is None:
            return
        while self.finish is None and self.how.logprobs is None and room > 0:
            for token in (tokens := form.forced_tokens(room)):
                yield self.accept(token)
                if self.finish is not None:
                    return
            room -= len(tokens)
            if not tokens:
                break
        form.prepare()

    def _piece(
        self,
        token: int,
        logprob: float | None = None,
        likeliest: tuple[tuple[int, float], ...] = (),
    ) -> Piece:
        assert self.finish is None, "the answer has ended"
        ends = self._tokenizer.is_eog(token)
        if ends:
            text = ""
        else:
            self.tokens.append(token)
            text = self._stops.feed(self._characters.feed(token))
        self.finish = self._finish(ends)
        if self.finish not in (None, Finish.STOP_STRING):
            text += self._rest()
        return Piece(text, token, self.finish, logprob, likeliest)

    def _finish(self, ends: bool) -> Finish | None:
        if ends:
            return Finish.STOP_TOKEN
        if self._stops.reached is not None:
            return Finish.STOP_STRING
        if self._sampler.form is not None and self._sampler.form.is_complete:
            return Finish.FORM
        if len(self.tokens) == self._n_tokens:
            return Finish.LENGTH
        if self._room is not None and len(self.tokens) >= self._room:
            return Finish.CONTEXT
        return None

    def _rest(self) -> str:
        """The text that waited, at the end of the answer; it may complete a stop string."""
        text = self._stops.feed(self._characters.flush())
        return text if self._stops.reached is not None else text + self._stops.flush()


def complete(
    model: Model,
    prompt: Sequence[int] | np.ndarray,
    n_tokens: int,
    how: Sampling | None = None,
    n_ctx: int | None = None,
    cache_type: CacheType = "f16",
    n_keep: int | None = None,
    draft: Model | None = None,
) -> Iterator[Piece]:
    """The pieces of an answer of up to n_tokens; the last one says why it is the last.

    how: None takes the likeliest tokens. n_ctx: the most tokens of prompt and answer together;
    None: as many as needed. cache_type: of keys and values (pyggml.generation.memory). n_keep: a
    full context shifts and keeps its first n_keep tokens (Slot.shift); None: it ends the answer.
    draft: a smaller model that guesses tokens (pyggml.generation.speculation).

    Raises ConfigError for counts out of range, a type that does not fit the model and a context
    that cannot shift; DataError for a prompt that is empty or does not fit into n_ctx.
    """
    how = how or Sampling(temperature=0)
    room = n_ctx if n_keep is None else None
    completion = Completion(model.tokenizer, how, prompt, n_tokens, room)
    most = len(prompt) + max(n_tokens, 1)
    session = Session(model, most if n_ctx is None else min(most, n_ctx), cache_type, draft)
    if n_keep is not None:
        check_shift(model, session.n_ctx, n_keep)
    tokens: Tokens = prompt
    if completion.finish is not None:  # no token is wanted; a prompt that does not fit is refused
        session.feed(prompt)
    while completion.finish is None:
        for piece in session.pieces(completion, tokens):
            yield piece
            tokens = [piece.token]
            if piece.finish is not None:
                return
        assert n_keep is not None  # the context is full
        session.shift(n_keep)


def generate(
    model: Model,
    prompt: Sequence[int] | np.ndarray,
    n_tokens: int,
    how: Sampling | None = None,
    n_ctx: int | None = None,
) -> Iterator[int]:
    """The token ids of an answer, one at a time, without a stop token. Otherwise as `complete`.

    A stop string ends it with the token that completes it.
    """
    for piece in complete(model, prompt, n_tokens, how, n_ctx):
        if piece.finish is not Finish.STOP_TOKEN:
            yield piece.token
