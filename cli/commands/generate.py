"""`pyggml generate`: prompt → prompt and what follows, as it is made."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import click

import pyggml.threads
from pyggml import Model, load
from pyggml.cli.terminal.help import GroupedCommand, GroupedOption
from pyggml.cli.terminal.options import SETTINGS, given_settings, model_options, settings_options
from pyggml.cli.terminal.sampling import sampling_of, sampling_options, show
from pyggml.cli.terminal.show import printable, say, unescaped
from pyggml.errors import ConfigError
from pyggml.generation import Context, Finish, complete

_TEXT: dict[str, Any] = {"cls": GroupedOption, "group": "text", "common": True}


@click.command(
    "generate",
    cls=GroupedCommand,
    params=[*settings_options(Context, {}), *sampling_options()],
    context_settings=SETTINGS,
)
@model_options
@click.option("-p", "--prompt", required=True, **_TEXT, help="text to continue; \\n is a new line")
@click.option(
    *("-n", "--n-tokens"),
    type=click.IntRange(min=1),
    metavar="N",
    default=128,
    show_default=True,
    **_TEXT,
    help="most tokens to write",
)
@click.option(
    "--ctx",
    type=click.IntRange(min=2),
    metavar="N",
    **_TEXT,
    help="most tokens, prompt included (default: the model's context)",
)
def command(
    model: Path,
    lora: tuple[tuple[Path, float], ...] | None,
    threads: int,
    compute: str,
    device: str,
    prompt: str,
    n_tokens: int,
    ctx: int | None,
    **given: Any,
) -> None:
    """Write text that follows a prompt; the same seed gives the same text."""
    how = sampling_of(given).with_seed()
    kept = Context(**given_settings(Context, {}, given))
    opened = load(model, lora and [*lora], compute, device=device)
    pyggml.threads.set(threads)
    prompt = unescaped(prompt)
    ids = opened.tokenizer.encode(prompt, parse_special=True)
    n_ctx = _context(opened, len(ids), ctx)
    as_text = how.logprobs is None
    say(printable(prompt), end="" if as_text else "\n")
    began, n = perf_counter(), 0
    for piece in complete(opened, ids, n_tokens, how, n_ctx, kept.cache_type, kept.n_keep):
        n += 1
        show(piece, how, opened.tokenizer)
    if as_text:
        say("")
    if piece.finish is Finish.CONTEXT:
        print(f"note: the context of {n_ctx} tokens is full", file=sys.stderr)
    if sys.stderr.isatty():
        speed = n / (perf_counter() - began)
        print(f"({n} tokens, {speed:.1f} tokens/s, --seed {how.seed})", file=sys.stderr)


def _context(model: Model, n_prompt: int, ctx: int | None) -> int:
    """Most tokens of prompt and text together."""
    most = model.config.n_ctx
    if ctx is not None and ctx > most:
        raise ConfigError([("ctx", f"is {ctx}, wanted at most the model's {most}")])
    n_ctx = ctx or most
    if not n_prompt:
        raise ConfigError("the prompt is empty, wanted text")
    if n_prompt >= n_ctx:
        raise ConfigError(f"the prompt has {n_prompt} tokens, wanted fewer than the {n_ctx} of ctx")
    return n_ctx
