"""Sampling on the command line: its options, and how the probabilities of tokens are shown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pyggml.cli.terminal.help import GroupedOption
from pyggml.cli.terminal.options import given_settings, settings_options
from pyggml.cli.terminal.show import printable, say, unescape
from pyggml.generation import Piece, Sampling
from pyggml.tokenizer import Tokenizer

_FLAGS = {"temperature": "temp"}  # llama.cpp's name


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


def say_piece(piece: Piece, how: Sampling, tokenizer: Tokenizer) -> None:
    """Print the text of a piece; with `logprobs`, a line of its token instead."""
    if how.logprobs is None:
        say(printable(piece.text), end="")
    else:
        say(_probabilities(piece, tokenizer))


def _probabilities(piece: Piece, tokenizer: Tokenizer) -> str:
    """A token, its log-probability, and the likeliest tokens: 'a' -1.204 | 'the' 60.0 %."""

    def quoted(token: int) -> str:
        return repr(tokenizer.token_bytes(token, special=True).decode("utf-8", "replace"))

    assert piece.logprob is not None
    others = [f"{quoted(token)} {100 * math.exp(p):.1f} %" for token, p in piece.likeliest]
    return f"{quoted(piece.token):<16} {piece.logprob:8.3f}" + "".join(f" | {o}" for o in others)
