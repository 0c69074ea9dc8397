"""The options of `pyggml chat`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

import pyggml.threads
from pyggml import load
from pyggml.chat import BUILT_IN, MODEL, find_template
from pyggml.cli.commands.chat.console import Console
from pyggml.cli.commands.chat.conversation import Conversation
from pyggml.cli.terminal.help import GroupedCommand, GroupedOption
from pyggml.cli.terminal.options import SETTINGS, given_settings, model_options, settings_options
from pyggml.cli.terminal.sampling import sampling_of, sampling_options
from pyggml.cli.terminal.show import printable, say, unescape
from pyggml.errors import ConfigError
from pyggml.generation import Context

_TEXT: dict[str, Any] = {"cls": GroupedOption, "group": "text", "common": True}
_CTX = 4096
_OF_TEXTS = ("context_shift", "keep")  # of a chat the oldest rounds are left out


@click.command(
    "chat",
    cls=GroupedCommand,
    params=[*settings_options(Context, {}, _OF_TEXTS), *sampling_options()],
    context_settings=SETTINGS,
)
@model_options
@click.option("--system", metavar="TEXT", **_TEXT, help="what stands before all messages")
@click.option(
    "--chat-template",
    metavar="WORD",
    default=MODEL,
    show_default=True,
    **_TEXT,
    help=f"how chats are written: model is the way of its file; {', '.join(BUILT_IN)}; or a file",
)
@click.option(
    *("-n", "--n-tokens"),
    type=click.IntRange(min=1),
    metavar="N",
    **_TEXT,
    help="most tokens of an answer (default: as many as fit)",
)
@click.option(
    "--ctx",
    type=click.IntRange(min=16),
    metavar="N",
    **_TEXT,
    help=f"most tokens that the model remembers (default: {_CTX}, or the model's if that has "
    "fewer); then the oldest rounds are left out",
)
def command(
    model: Path,
    lora: tuple[tuple[Path, float], ...] | None,
    threads: int,
    compute: str,
    device: str,
    system: str | None,
    chat_template: str,
    n_tokens: int | None,
    ctx: int | None,
    **given: Any,
) -> int:
    """Talk with a model. /help lists the commands, Ctrl-C ends an answer, Ctrl-D the chat.

    Without a terminal, each line of standard input is a message.
    """
    how = sampling_of(given)
    cache_type = Context(**given_settings(Context, {}, given)).cache_type
    opened = load(model, lora and [*lora], compute, device=device)
    pyggml.threads.set(threads)
    most = opened.config.n_ctx
    if ctx is not None and ctx > most:
        raise ConfigError([("ctx", f"is {ctx}, wanted at most the model's {most}")])
    template = find_template(opened.tokenizer, chat_template)
    text = None if system is None else unescape(system)
    n_ctx = ctx or min(_CTX, most)
    chat = Conversation(opened, template, how, n_ctx, n_tokens, text, cache_type)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        name = printable(str(opened.file.get("general.name", model.name)))
        say(f"{name}, as {template.origin} has it; /help lists commands, Ctrl-D ends")
    return Console(chat, interactive).run()
