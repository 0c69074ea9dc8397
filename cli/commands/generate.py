"""`pyggml generate`: a prompt, or chats → what follows, as it is made."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyggml import Model
from pyggml.chat import MODEL, ChatEncoder, answer_ending, carries_template
from pyggml.chat.messages import BadValue
from pyggml.cli.terminal.chat_templates import chat_template_options, choose_template, template_for
from pyggml.cli.terminal.data_files import columns_option, data_option
from pyggml.cli.terminal.generation import (
    Pace,
    continue_last_option,
    ctx_option,
    n_ctx_of,
    n_tokens_option,
    sampling_of,
    sampling_options,
    say_piece,
)
from pyggml.cli.terminal.help import grouped_command, grouped_option
from pyggml.cli.terminal.options import (
    ModelSource,
    draft_option,
    given_settings,
    model_options,
    settings_options,
)
from pyggml.cli.terminal.show import note, plural, say, say_progress, unescape
from pyggml.errors import ConfigError, DataError, TemplateError
from pyggml.generation import Context, Finish, Piece, Sampling, complete

if TYPE_CHECKING:
    from pyggml.cli.terminal.prompts import AskedPrompt

_OF_CHATS = ("chat_template", "chat_template_kwargs", "continue_last", "columns")


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Tokens to go on from, and the text that is printed before what follows them."""

    ids: list[int]
    shown: str


@grouped_command(
    "generate",
    'pyggml generate -m model.gguf -p "Once upon a time"',
    'pyggml generate -m model.gguf --lora adapter.gguf -p "..." -n 256 --temp 0',
    "pyggml generate -m model.gguf --messages chats.jsonl --json",
    params=[*settings_options(Context, {}), *sampling_options(), columns_option()],
    quiet="speed",
)
@model_options
@draft_option
@grouped_option("text", "-p --prompt", "text to continue; \\n is a new line")
@data_option(
    "chats and prompts to answer instead: rows as finetune reads them, without their answers",
    "--messages",
    "text",
    required=False,
)
@chat_template_options(common=False)
@continue_last_option
@grouped_option("text", "--json as_json", "print a line of JSON for each prompt", is_flag=True)
@n_tokens_option("most tokens to write", default=128, show_default=True)
@ctx_option(2, "most tokens, prompt included (default: the model's context)")
def command(
    source: ModelSource,
    draft: Path | None,
    prompt: str | None,
    messages: tuple[Path, ...],
    as_json: bool,
    n_tokens: int,
    ctx: int | None,
    **given: Any,
) -> None:
    """Write text that follows a prompt, or answer chats; the same seed gives the same text."""
    _check(prompt, messages, given)
    how = sampling_of(given).with_seed()
    cache = Context(**given_settings(Context, {}, given))
    rows = _read(messages, given["columns"]) if messages else []
    opened, drafting = source.load(n_rows=1), source.load_draft(draft)
    if messages:
        prompts, how = _prompts(opened, source, rows, given, how)
    else:
        _note_chats(source)
        prompts = [_of_text(opened, unescape(prompt or ""))]
    rooms = [_context(opened, len(each.ids), ctx) for each in prompts]
    for each, n_ctx in zip(prompts, rooms, strict=True):
        kept = n_ctx, cache.cache_types, cache.n_keep
        pieces = complete(opened, each.ids, n_tokens, how, *kept, drafting)
        if as_json:
            say(_record(opened, each, pieces, how), as_is=True)
        else:
            _write(opened, each, pieces, how, n_ctx)


def _read(messages: Sequence[Path], columns: Sequence[str] | None) -> list[AskedPrompt]:
    from pyggml.cli.terminal.prompts import read_prompts  # which reads files as training does

    return read_prompts(messages, columns)


def _check(prompt: str | None, messages: Sequence[Path], given: Mapping[str, Any]) -> None:
    """ConfigError unless there is a prompt or a file of chats, and for options without effect."""
    if (prompt is None) == (not messages):
        raise ConfigError("wanted -p TEXT, or --messages FILE")
    idle = [name for name in _OF_CHATS if given[name]] if not messages else []
    if idle:
        options = ", ".join("--" + name.replace("_", "-") for name in idle)
        raise ConfigError(f"{options}: for chats, wanted --messages FILE beside it")


def _note_chats(source: ModelSource) -> None:
    """Say so where an adapter was trained on chats, and is given text."""
    for path, _ in source.adapters:
        if carries_template(path):
            note(
                f"{path.name} was trained on chats; -p is text as it is: --messages or pyggml chat"
            )
            return


def _encoder(
    model: Model, source: ModelSource, given: Mapping[str, Any]
) -> tuple[ChatEncoder, list[str]]:
    """What writes chats, and the text that ends an answer, if any does."""
    inputs = given["chat_template_kwargs"]
    template = template_for(model, source.adapters, given["chat_template"], inputs)
    ending = answer_ending(template)
    return ChatEncoder(template, model.tokenizer), [ending] if ending else []


def _of_text(model: Model, text: str) -> _Prompt:
    return _Prompt(model.tokenizer.encode_prompt(text), text)


def _prompts(
    model: Model,
    source: ModelSource,
    rows: Sequence[AskedPrompt],
    given: Mapping[str, Any],
    how: Sampling,
) -> tuple[list[_Prompt], Sampling]:
    """The prompts as tokens, and how they are answered: chats end as their template has it."""
    prompts, continues, encoder = list[_Prompt](), given["continue_last"], None
    if any(each.is_question for each in rows) and _has_template(model, source, given):
        rows = [each.as_chat for each in rows]
    if any(not isinstance(each.prompt, str) for each in rows):
        encoder, ending = _encoder(model, source, given)
        how = replace(how, stop=(*how.stop, *ending))
    for each in rows:
        try:
            prompts.append(_of_row(model, encoder, each, continues))
        except (TemplateError, BadValue) as error:
            fault = BadValue(str(error), ": ").at(each.place)
            raise DataError(f"{each.place.file}: {fault}") from None
    n = sum(bool(each.answer) for each in rows)
    if n and not continues:
        note(f"{plural(n, 'row')} with an answer, which is left out: another is written")
    return prompts, how


def _has_template(model: Model, source: ModelSource, given: Mapping[str, Any]) -> bool:
    """Whether there is a template to write questions with, as training looks for one."""
    choice = choose_template(model.tokenizer, source.adapters, given["chat_template"])
    return choice.template != MODEL or bool(model.tokenizer.chat_templates)


def _of_row(
    model: Model, encoder: ChatEncoder | None, row: AskedPrompt, continues: bool
) -> _Prompt:
    """The tokens up to an answer; of one that is gone on with its words are shown."""
    if isinstance(row.prompt, str) and not continues:
        return _of_text(model, row.prompt)
    messages = row.messages if continues else row.prompt
    assert encoder is not None and not isinstance(messages, str)
    ids = encoder.prompt(messages, row.tools, continues)
    return _Prompt(ids, str(messages[-1]["content"]) if continues else "")


def _context(model: Model, n_prompt: int, ctx: int | None) -> int:
    """Most tokens of prompt and text together."""
    n_ctx = n_ctx_of(model, ctx)
    if not n_prompt:
        raise ConfigError("the prompt is empty, wanted text")
    if n_prompt >= n_ctx:
        raise ConfigError(f"the prompt has {n_prompt} tokens, wanted fewer than the {n_ctx} of ctx")
    return n_ctx


# -- what is printed ----------------------------------------------------------------------------


def _write(
    model: Model, prompt: _Prompt, pieces: Iterator[Piece], how: Sampling, n_ctx: int
) -> None:
    """The prompt and its answer, as it is made."""
    as_text = how.logprobs is None
    if prompt.shown:
        say(prompt.shown, end="" if as_text else "\n")
    pace = Pace(model)
    try:
        for piece in pieces:
            pace.count()
            say_piece(piece, how, model.tokenizer)
    finally:  # of an error, too, which has a line of its own
        if as_text:
            say("")
    if piece.finish is Finish.CONTEXT:
        note(f"the context of {n_ctx} tokens is full")
    if how.has_form and piece.finish not in (Finish.FORM, Finish.STOP_TOKEN):
        note("the answer ends before its form is complete")
    if sys.stderr.isatty():
        say_progress(f"({pace.n} tokens, {pace}, --seed {how.seed})")


def _record(model: Model, prompt: _Prompt, pieces: Iterator[Piece], how: Sampling) -> str:
    """The same as JSON, in the words of the OpenAI API where it has them."""
    parts = [*pieces]
    answer = [piece for piece in parts if piece.finish is not Finish.STOP_TOKEN]
    record: dict[str, Any] = {
        "text": "".join(piece.text for piece in parts),
        "finish_reason": parts[-1].finish.reason if parts[-1].finish else None,
        "tokens": [piece.token for piece in answer],
        "prompt_tokens": prompt.ids,
        "seed": how.seed,
    }
    if how.logprobs is not None:
        record["logprobs"] = [
            {"token": piece.token, "logprob": piece.logprob, "top_logprobs": dict(piece.likeliest)}
            for piece in answer
        ]
    return json.dumps(record, ensure_ascii=False)
