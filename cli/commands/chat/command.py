"""The options of `pyggml chat`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyggml.chat.messages import BadValue
from pyggml.cli.commands.chat.console import Console
from pyggml.cli.commands.chat.conversation import Conversation
from pyggml.cli.commands.chat.lines import END_KEYS
from pyggml.cli.terminal.chat_templates import chat_template_options, template_for
from pyggml.cli.terminal.data_files import columns_option, data_option
from pyggml.cli.terminal.generation import (
    CTX,
    continue_last_option,
    ctx_option,
    n_ctx_of,
    n_tokens_option,
    sampling_of,
    sampling_options,
    system_option,
)
from pyggml.cli.terminal.help import grouped_command
from pyggml.cli.terminal.options import (
    ModelSource,
    draft_option,
    given_settings,
    model_options,
    settings_options,
)
from pyggml.cli.terminal.show import is_quiet, say, unescape
from pyggml.errors import ConfigError, DataError
from pyggml.generation import Context

if TYPE_CHECKING:
    from pyggml.cli.terminal.prompts import AskedPrompt

_OF_TEXTS = ("context_shift", "keep")  # of a chat the oldest rounds are left out


@grouped_command(
    "chat",
    "pyggml chat -m model.gguf",
    'pyggml chat -m model.gguf --lora adapter.gguf --system "Answer in one line."',
    'echo "What is a tensor?" | pyggml chat -m model.gguf --temp 0',
    params=[*settings_options(Context, {}, _OF_TEXTS), *sampling_options(), columns_option()],
    quiet="greeting",
)
@model_options
@draft_option
@system_option
@chat_template_options()
@data_option(
    "begin with this conversation, as /save writes it; of several with the last",
    "--messages",
    "text",
    required=False,
)
@continue_last_option
@n_tokens_option("most tokens of an answer (default: as many as fit)")
@ctx_option(
    16,
    f"most tokens that the model remembers (default: {CTX}, or the model's if that has fewer); "
    "then the oldest rounds are left out",
)
def command(
    source: ModelSource,
    draft: Path | None,
    system: str | None,
    chat_template: str | None,
    chat_template_kwargs: str,
    messages: tuple[Path, ...],
    continue_last: bool,
    n_tokens: int | None,
    ctx: int | None,
    **given: Any,
) -> int:
    """Talk with a model. /help lists the commands, Ctrl-C ends an answer, /bye the chat.

    Without a terminal, each line of standard input is a message.
    """
    if continue_last and not messages:
        raise ConfigError("--continue-last: for a conversation, wanted --messages FILE beside it")
    opening = _read(messages, given["columns"]) if messages else []
    how = sampling_of(given)
    cache_type = Context(**given_settings(Context, {}, given)).cache_types
    opened = source.load(n_rows=1)
    n_ctx = n_ctx_of(opened, ctx, CTX)
    template = template_for(opened, source.adapters, chat_template, chat_template_kwargs)
    text = None if system is None else unescape(system)
    drafting = source.load_draft(draft)
    chat = Conversation(opened, template, how, n_ctx, n_tokens, text, cache_type, drafting)
    for one in opening:
        _load(chat, one)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive and not is_quiet():
        name = opened.file.get("general.name", source.path.name)
        say(f"{name}, as {template.origin} has it; /help lists commands, {END_KEYS} ends")
    return Console(chat, interactive).run(continue_last)


def _read(messages: Sequence[Path], columns: Sequence[str] | None) -> list[AskedPrompt]:
    from pyggml.cli.terminal.prompts import read_prompts  # which reads files as training does

    return read_prompts(messages, columns)[-1:]


def _load(chat: Conversation, opening: AskedPrompt) -> None:
    """Raises DataError with the place of a conversation that cannot be gone on with."""
    try:
        if opening.tools:
            raise DataError("has tools, which nothing would call")
        chat.load(opening.as_chat.messages)
    except (DataError, BadValue) as error:
        raise DataError(f"{opening.place.file}: {opening.place} {error}") from None
