"""`pyggml export-ollama`: model, adapter and settings → a Modelfile for `ollama create`."""

from pathlib import Path
from typing import Any

from pyggml import Model, load
from pyggml.chat import MODEL, ChatTemplate, answer_ending, find_template, find_turns
from pyggml.cli.commands.export_ollama.modelfile import go_template, path_for, quote
from pyggml.cli.terminal.chat_templates import chat_template_options, choose_template
from pyggml.cli.terminal.generation import (
    CTX,
    ctx_option,
    n_ctx_of,
    sampling_of,
    sampling_options,
    system_option,
)
from pyggml.cli.terminal.help import grouped_command, grouped_option
from pyggml.cli.terminal.kinds import MODELFILE
from pyggml.cli.terminal.options import ADAPTERS, model_option
from pyggml.cli.terminal.places import OutputPath
from pyggml.cli.terminal.show import note, printable, say, unescape
from pyggml.errors import ConfigError, PyggmlError
from pyggml.files import replacing
from pyggml.generation import Sampling
from pyggml.generation.sampling import FORMS

# Settings that Ollama has under the same name; of the first four its defaults are others.
_ALWAYS = ("temperature", "top_k", "top_p", "min_p")
_IF_GIVEN = ("repeat_penalty", "repeat_last_n", "frequency_penalty", "presence_penalty", "seed")
_NO_ADAPTERS = (
    "Ollama 0.34.1 and later are reported to refuse ADAPTER; for these, pyggml merge makes one "
    "model of both, and export-ollama writes its Modelfile"
)
_WITHOUT = (
    "logit_bias",
    "logprobs",
    "ngram",
    "draft_max",
    *FORMS,
)  # it has none, or has them by request


@grouped_command(
    "export-ollama",
    "pyggml export-ollama -m model.gguf && ollama create mine -f Modelfile",
    "pyggml export-ollama -m model.gguf --lora adapter.gguf -o Modelfile --force",
    'pyggml export-ollama -m model.gguf --system "Answer in one line." --temp 0.2',
    params=[*sampling_options(without=_WITHOUT)],
)
@model_option
@grouped_option("model", "--lora", "adapter to use with it", **ADAPTERS)
@system_option
@chat_template_options()
@ctx_option(16, f"most tokens of a chat (default: {CTX}, or the model's if that has fewer)")
@grouped_option(
    "output", "-o --output", "file to write", type=OutputPath(MODELFILE), default=Path("Modelfile")
)
def command(
    model: Path,
    lora: tuple[tuple[Path, float], ...] | None,
    system: str | None,
    chat_template: str | None,
    chat_template_kwargs: str,
    ctx: int | None,
    output: Path,
    **given: Any,
) -> None:
    """Write a Modelfile, of which `ollama create NAME -f Modelfile` makes a model."""
    how = sampling_of(given)
    adapters = [*(lora or ())]
    if len(adapters) > 1 or any(weight != 1 for _, weight in adapters):
        raise ConfigError(
            "Ollama takes one adapter, at weight 1: make one of yours with pyggml combine, or one "
            "model with pyggml merge, and export that"
        )
    opened = load(model, adapters or None)
    _check_is_one_file(opened, model, bool(adapters))
    choice = choose_template(opened.tokenizer, adapters, chat_template)
    template = _find_template(opened, choice.template, chat_template_kwargs)
    chat, missing = _chat(opened, template)
    lines = [
        f"FROM {path_for(model, output)}",
        *(f"ADAPTER {path_for(path, output)}" for path, _ in adapters),
        chat,
        *([] if system is None else [f"SYSTEM {quote(unescape(system))}"]),
        *_parameters(how, template, n_ctx_of(opened, ctx, CTX)),
    ]
    with replacing(output) as out:
        out.write(("\n".join(lines) + "\n").encode())
    for text in (*choice.notes, missing, _NO_ADAPTERS if adapters else ""):
        if text:
            note(text)
    say(f"{output} written; next: ollama create NAME -f {output}")


def _check_is_one_file(opened: Model, path: Path, has_adapter: bool) -> None:
    """ConfigError for a model in several files, of which Ollama would read the first alone."""
    n = len(opened.file.paths)
    if n > 1:
        first = opened.file.paths[0].name
        way = "pyggml merge makes one file of it and the adapter" if has_adapter else (
            f"`llama-gguf-split --merge {first} OUT.gguf` makes one of them"
        )  # fmt: skip
        raise ConfigError(f"{path}: is one of {n} files of a model, and Ollama takes one: {way}")


def _find_template(model: Model, name: str, inputs: str) -> ChatTemplate | None:
    """The named template; None if it would be the model's own and that has none."""
    if name == MODEL and not {"", "default"} & model.tokenizer.chat_templates.keys():
        return None
    return find_template(model.tokenizer, name, names=inputs)


def _chat(model: Model, template: ChatTemplate | None) -> tuple[str, str]:
    """The template as Ollama has it, and ""; or a comment and a note why there is none."""
    if template is None:
        return _omission("the model has none; --chat-template names one")
    special = model.tokenizer.special_texts()
    bos = special.get("bos_token", "") if model.tokenizer.add_bos else ""
    try:
        turns = find_turns(template, special.get("eos_token", "")).without(bos)
        text = f"TEMPLATE {quote(go_template(turns))}"
    except PyggmlError as error:
        return _omission(f"{template.origin} is not one of turns: {error}")
    dated = "strftime_now" in template.source
    return "# The date in this template is that of its export.\n" * dated + text, ""


def _omission(reason: str) -> tuple[str, str]:
    said = f"TEMPLATE is left out: {printable(' '.join(reason.split()))}"
    return f"# {said}", said


def _parameters(how: Sampling, template: ChatTemplate | None, n_ctx: int) -> list[str]:
    """What Ollama calls parameters. The text that ends a turn stops an answer."""
    usual = Sampling()
    names = [n for n in _IF_GIVEN if getattr(how, n) != getattr(usual, n)]
    numbers = {"num_ctx": n_ctx} | {name: getattr(how, name) for name in (*_ALWAYS, *names)}
    ending = "" if template is None else answer_ending(template)
    stops = dict.fromkeys([*filter(None, [ending]), *how.stop])
    return [f"PARAMETER {name} {number}" for name, number in numbers.items()] + [
        f"PARAMETER stop {quote(stop)}" for stop in stops
    ]
