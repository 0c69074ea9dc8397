"""What is asked of a scheduler, and what it tells on the way."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pyggml.errors import PyggmlError
from pyggml.generation import Completion, Finish, Piece
from pyggml.model import Model


class RequestExpired(PyggmlError):
    """A request whose time has come to an end."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A request ends without the rest of its answer. An error that is no PyggmlError is a fault of
    the program."""

    error: Exception


def expiry_failure() -> Failure:
    """That of a request whose turn did not come in time."""
    return Failure(RequestExpired("the request's time ended before its turn came"))


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt's own tokens, as the model predicts them: pieces without text. Of the first token
    nothing is predicted.

    finish   why no answer follows, or None
    """

    pieces: tuple[Piece, ...]
    finish: Finish | None


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """A prompt to be continued; submitted once.

    prompt       (n,) int32, at least one token
    completion   what samples the answer, and says when it ends
    model        the batch's model, or that with other adapters
    tell         called with each piece, from the thread that computes. The last call has a
                 `finish`, or is a Failure; there is none after a cancellation
    n_likeliest  not None: the first call has a ReadPrompt, with so many of the likeliest tokens at
                 each place. The prompt is then computed as a whole, and the completion may be one
                 of no tokens
    deadline     time.monotonic() at which it fails with RequestExpired
    owner        whose prompt it is: only prompts of one owner share what the cache has of them
    n_cached     how many tokens of the prompt were in the cache; known with the first piece
    """

    prompt: np.ndarray
    completion: Completion
    model: Model
    tell: Callable[[Piece | ReadPrompt | Failure], None] = field(default=lambda event: None)
    n_likeliest: int | None = None
    deadline: float = math.inf
    owner: int | None = None
    n_cached: int = field(default=0, init=False)
