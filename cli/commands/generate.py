"""`pyggml generate`: prompt → prompt and what follows, as it is made."""

import sys
from time import perf_counter
from typing import Any

import click

from pyggml import Model
from pyggml.cli.terminal.generation import (
    ctx_option,
    n_ctx_of,
    n_tokens_option,
    sampling_of,
    sampling_options,
    say_piece,
)
from pyggml.cli.terminal.help import GroupedCommand
from pyggml.cli.terminal.options import (
    SETTINGS,
    ModelSource,
    given_settings,
    grouped,
    model_options,
    settings_options,
)
from pyggml.cli.terminal.show import note, printable, say, unescape
from pyggml.errors import ConfigError
from pyggml.generation import Context, Finish, complete


@click.command(
    "generate",
    cls=GroupedCommand,
    params=[*settings_options(Context, {}), *sampling_options()],
    context_settings=SETTINGS,
)
@model_options
@click.option(
    "-p", "--prompt", required=True, **grouped("text"), help="text to continue; \\n is a new line"
)
@n_tokens_option("most tokens to write", default=128, show_default=True)
@ctx_option(2, "most tokens, prompt included (default: the model's context)")
def command(source: ModelSource, prompt: str, n_tokens: int, ctx: int | None, **given: Any) -> None:
    """Write text that follows a prompt; the same seed gives the same text."""
    how = sampling_of(given).with_seed()
    cache = Context(**given_settings(Context, {}, given))
    opened = source.load()
    prompt = unescape(prompt)
    ids = opened.tokenizer.encode_prompt(prompt)
    n_ctx = _context(opened, len(ids), ctx)
    as_text = how.logprobs is None
    say(printable(prompt), end="" if as_text else "\n")
    began, n = perf_counter(), 0
    for piece in complete(opened, ids, n_tokens, how, n_ctx, cache.cache_type, cache.n_keep):
        n += 1
        say_piece(piece, how, opened.tokenizer)
    if as_text:
        say("")
    if piece.finish is Finish.CONTEXT:
        note(f"the context of {n_ctx} tokens is full")
    if sys.stderr.isatty():
        speed = n / (perf_counter() - began)
        print(f"({n} tokens, {speed:.1f} tokens/s, --seed {how.seed})", file=sys.stderr)


def _context(model: Model, n_prompt: int, ctx: int | None) -> int:
    """Most tokens of prompt and text together."""
    n_ctx = n_ctx_of(model, ctx)
    if not n_prompt:
        raise ConfigError("the prompt is empty, wanted text")
    if n_prompt >= n_ctx:
        raise ConfigError(f"the prompt has {n_prompt} tokens, wanted fewer than the {n_ctx} of ctx")
    return n_ctx
