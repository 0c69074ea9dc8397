"""Commands that write text: their options, and how a token and its probabilities are printed."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from time import perf_counter
from typing import Any

import click

from pyggml.cli.terminal.help import F, GroupedOption, grouped_option
from pyggml.cli.terminal.options import given_settings, settings_options
from pyggml.cli.terminal.show import percent, say, speed, unescape
from pyggml.errors import ConfigError
from pyggml.generation import Piece, Sampling
from pyggml.look.limits import generation_seconds, share_of_limit
from pyggml.model import Model
from pyggml.tokenizer import Tokenizer

CTX = 4096  # most tokens of a chat, where the user names no other number
_FLAGS = {"temperature": "temp"}  # llama.cpp's name
system_option = grouped_option("text", "--system", "system prompt", metavar="TEXT")


continue_last_option = grouped_option(
    "text",
    "--continue-last",
    "go on with the last message, which the assistant began, instead of answering anew",
    is_flag=True,
    common=False,
)


def n_tokens_option(help: str, **settings: Any) -> Callable[[F], F]:
    """-n, --n-tokens."""
    kind, aliases = click.IntRange(min=1), ("n-predict", "max-tokens", "max-new-tokens")
    return grouped_option("text", "-n --n-tokens", help, type=kind, aliases=aliases, **settings)


def ctx_option(least: int, help: str) -> Callable[[F], F]:
    """--ctx."""
    kind = click.IntRange(min=least)
    return grouped_option("text", "--ctx", help, type=kind, aliases=("ctx-size",))


def n_ctx_of(model: Model, ctx: int | None, default: int | None = None) -> int:
    """The tokens of a context: as many as are wanted; without that the default, if the model has so
    many, else the model's. ConfigError for more than the model's."""
    most = model.config.n_ctx
    if ctx is not None and ctx > most:
        raise ConfigError([("ctx", f"is {ctx}, wanted at most the model's {most}")])
    return ctx or min(default or most, most)


def sampling_options(without: Iterable[str] = ()) -> list[GroupedOption]:
    """An option for every setting but those left out."""
    return settings_options(Sampling, _FLAGS, without)


def sampling_of(given: Mapping[str, Any]) -> Sampling:
    """The settings that the options give; \\n in texts is a new line, as in a prompt.

    ConfigError if one is out of range.
    """
    settings = given_settings(Sampling, _FLAGS, given)
    if "stop" in settings:
        settings["stop"] = tuple(map(unescape, settings["stop"]))
    if "logit_bias" in settings:
        settings["logit_bias"] = {unescape(t): bias for t, bias in settings["logit_bias"].items()}
    return Sampling(**settings)


class Pace:
    """How fast tokens come. The first waits for the prompt; of the others, the share of this
    machine's memory bandwidth that reading the model once for each takes."""

    def __init__(self, model: Model) -> None:
        self._model, self.n = model, 0
        self._began = self._first = self._last = perf_counter()

    def count(self) -> None:
        """Once for each token."""
        self._last = perf_counter()
        self._first = self._last if not self.n else self._first
        self.n += 1

    def __str__(self) -> str:
        """57.9 tokens/s, 71 % of the memory bandwidth; what is unknown is left out."""
        seconds, each = perf_counter() - self._began, self._last - self._first
        of_all = speed(self.n, seconds)
        least = partial(generation_seconds, self._model)
        of_limit = share_of_limit(least, self.n - 1, each) if each else None
        return (
            of_all if of_limit is None else f"{of_all}, {percent(of_limit)} of the memory bandwidth"
        )


def say_piece(piece: Piece, how: Sampling, tokenizer: Tokenizer) -> None:
    """Print the text of a piece; with `logprobs`, a line of its token instead."""
    if how.logprobs is None:
        say(piece.text, end="")
    else:
        say(_probabilities(piece, tokenizer))


def _probabilities(piece: Piece, tokenizer: Tokenizer) -> str:
    """A token, its log-probability, and the likeliest tokens: 'a' -1.204 | 'the' 60.0 %."""

    def quote(token: int) -> str:
        return repr(tokenizer.token_bytes(token, special=True).decode("utf-8", "replace"))

    assert piece.logprob is not None
    likeliest = [f"{quote(token)} {100 * math.exp(p):.1f} %" for token, p in piece.likeliest]
    return f"{quote(piece.token):<16} {piece.logprob:8.3f}" + "".join(f" | {o}" for o in likeliest)
