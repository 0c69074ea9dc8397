"""`pyggml generate`: prompt → prompt and what follows, as it is made."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter

import click

import pyggml.threads
from pyggml import Model, load
from pyggml.cli.options import SETTINGS, model_options
from pyggml.cli.show import printable, say, unescaped
from pyggml.errors import ConfigError
from pyggml.generation import Sampling, generate

_DEFAULT = Sampling(temperature=0.8)


@click.command("generate", context_settings=SETTINGS)
@model_options
@click.option("-p", "--prompt", required=True, help="text to continue; \\n is a new line")
@click.option(
    "-n", "n_tokens", type=click.IntRange(min=1), default=128, show_default=True, help="tokens"
)
@click.option(
    "--temp", default=_DEFAULT.temperature, show_default=True, help="0 takes the likeliest token"
)
@click.option("--top-k", default=_DEFAULT.top_k, show_default=True, help="0: no limit")
@click.option("--top-p", default=_DEFAULT.top_p, show_default=True, help="1: no limit")
@click.option("--seed", default=_DEFAULT.seed, show_default=True)
@click.option(
    "--ctx", type=click.IntRange(min=2), help="most tokens, prompt included (default: as needed)"
)
def command(
    model: Path,
    lora: tuple[tuple[Path, float], ...] | None,
    threads: int,
    compute: str,
    prompt: str,
    n_tokens: int,
    temp: float,
    top_k: int,
    top_p: float,
    seed: int,
    ctx: int | None,
) -> None:
    """Write text that follows a prompt; the same seed gives the same text."""
    how = Sampling(temperature=temp, top_k=top_k, top_p=top_p, seed=seed)
    opened = load(model, lora and [*lora], compute)
    pyggml.threads.set(threads)
    prompt = unescaped(prompt)
    ids = opened.tokenizer.encode(prompt, parse_special=True)
    room = _room(opened, len(ids), ctx)
    say(printable(prompt), end="")
    began, n = perf_counter(), 0
    stream = opened.tokenizer.stream()
    for token in generate(opened, ids, min(n_tokens, room), how):
        n += 1
        say(printable(stream.feed(token)), end="")
    say(printable(stream.flush()))
    if n == room < n_tokens:
        print(f"note: the context of {len(ids) + room} tokens is full", file=sys.stderr)
    if sys.stderr.isatty():
        print(f"({n} tokens, {n / (perf_counter() - began):.1f} tokens/s)", file=sys.stderr)


def _room(model: Model, n_prompt: int, ctx: int | None) -> int:
    """Tokens that fit behind the prompt."""
    most = model.config.n_ctx
    if ctx is not None and ctx > most:
        raise ConfigError([("ctx", f"is {ctx}, wanted at most the model's {most}")])
    n_ctx = ctx or most
    if not n_prompt:
        raise ConfigError("the prompt is empty, wanted text")
    if n_prompt >= n_ctx:
        raise ConfigError(f"the prompt has {n_prompt} tokens, wanted fewer than the {n_ctx} of ctx")
    return n_ctx - n_prompt
