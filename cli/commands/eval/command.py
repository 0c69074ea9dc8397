"""The options of `pyggml eval`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pyggml import Model
from pyggml.chat import MODEL as OWN
from pyggml.cli.commands.eval.files import File
from pyggml.cli.commands.eval.record import record
from pyggml.cli.commands.eval.subjects import names, subjects
from pyggml.cli.commands.eval.table import NOTE, show
from pyggml.cli.terminal.chat_templates import choose_template
from pyggml.cli.terminal.data_files import data_files, data_option
from pyggml.cli.terminal.devices import WHERE
from pyggml.cli.terminal.help import grouped_command, grouped_option
from pyggml.cli.terminal.hub import MODEL
from pyggml.cli.terminal.options import (
    ONE_MODEL,
    Adapter,
    AdapterStack,
    ModelSource,
    check_control_layers,
    compute_options,
    control_options,
    given_settings,
    lora_option,
    settings_options,
)
from pyggml.cli.terminal.show import printable, say, unescape
from pyggml.errors import ConfigError, NotFiniteError
from pyggml.lora.config import EvalConfig
from pyggml.lora.evaluate.classes import labels_of


@grouped_command(
    "eval",
    "pyggml eval -m model.gguf -f held-out.jsonl",
    "pyggml eval -m base.gguf -f held-out.jsonl --compare adapter.gguf merged.gguf",
    "pyggml eval -m model.gguf --lora adapter.gguf -f questions.jsonl --json",
    params=[*settings_options(EvalConfig, {})],
)
@grouped_option("model", "-m --model", **ONE_MODEL, type=MODEL)
@lora_option
@control_options
@grouped_option(
    "model",
    "--compare",
    "also evaluate the files that follow, models and adapters of -m, and print how they "
    "differ from the first",
    is_flag=True,
    brief="also evaluate the files that follow",
)
@click.argument("stacks", nargs=-1, type=AdapterStack(), metavar="[--compare FILE...]")
@data_option(
    "text, rows as for finetune, pairs of chosen and rejected, questions with choices, texts with "
    "labels, or texts that belong together (docs/evaluation.md)"
)
@grouped_option("output", "--json as_json", "print JSON instead of tables", is_flag=True)
@compute_options
def command(
    model: Path | None,
    lora: tuple[Adapter, ...] | None,
    control_vector: tuple[Adapter, ...] | None,
    control_vector_layers: tuple[int, int] | None,
    compare: bool,
    stacks: tuple[tuple[Adapter, ...], ...],
    files: tuple[Path, ...],
    as_json: bool,
    **given: Any,
) -> None:
    """Perplexity, token accuracy and right answers of a model, with 95 % confidence intervals.

    --compare also evaluates models and adapters of -m on the same data, and prints how each differs
    from the first.
    """
    if stacks and not compare:
        raise ConfigError(f"{stacks[0][0][0]}: wanted --compare before files to compare")
    if compare and not stacks:
        raise ConfigError("--compare names no file, wanted models, or adapters of -m")
    for name in ("delimiter", "ask"):
        given[name] = given[name] and unescape(given[name])
    given["stop"] = given["stop"] and tuple(map(unescape, given["stop"]))
    config = EvalConfig(**given_settings(EvalConfig, {}, given))
    data = [File.read(path, config) for path in data_files(files, config.columns)]
    how = {name: given[name] for name in ("threads", "compute", *WHERE)}
    controls, layers = control_vector or (), control_vector_layers
    check_control_layers(layers, controls)
    _evaluate(subjects(model, lora, stacks, controls, layers, **how), data, config, as_json)


def _evaluate(
    models: Sequence[ModelSource], files: Sequence[File], config: EvalConfig, as_json: bool
) -> None:
    """Evaluate all models on one file after the other, and print what came of it."""
    called, records = names(models), []
    opened = [model.load() for model in models]
    template = OWN
    if config.chat_template is None and any(file.has_chats for file in files):
        template = _template(models, opened[0])
    labels = labels_of(opened)
    try:
        for file in files:
            results = [
                file.evaluate(
                    model, config, printable(f"{file.path.name}, {name}"), template, labels
                )
                for model, name in zip(opened, called, strict=True)
            ]
            if as_json:
                records.append(record(file, called, results))
            else:
                show(file, called, results)
    except NotFiniteError as error:
        raise NotFiniteError(f"{file.path}: {error}") from None
    finally:  # of a file at fault, those before it
        if records:
            say(json.dumps({"files": records}, indent=1))
    if not as_json:
        say(NOTE)


def _template(models: Sequence[ModelSource], first: Model) -> str:
    """The chat template for all models: that with which an adapter was trained, so that all read
    the same tokens; else each one's own. ConfigError if adapters were trained with several."""
    adapters = {path: (path, w) for model in models for path, w in model.adapters[::-1]}
    choice = choose_template(first.tokenizer, [*adapters.values()][::-1], None)
    if choice.differing and len(models) > 1:
        names = " and ".join(str(path) for path in (*choice.differing, choice.template))
        raise ConfigError(
            f"{names} were trained with different chat templates: name one for all with "
            "--chat-template, which takes such a file too"
        )
    choice.say_notes()
    return choice.template
