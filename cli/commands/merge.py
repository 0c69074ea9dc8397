"""`pyggml merge`: a model and adapters → one model, and how much of the updates is in it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import click

import pyggml.threads
from pyggml import gguf, load
from pyggml.cli.terminal.chat_templates import choose_template
from pyggml.cli.terminal.help import grouped_command, grouped_option
from pyggml.cli.terminal.kinds import MODEL_FILE
from pyggml.cli.terminal.options import (
    ADAPTERS,
    Adapter,
    adapter_word,
    model_option,
    output_option,
    threads_option,
)
from pyggml.cli.terminal.rewriting import (
    IMATRIX,
    TENSORS,
    RewriteProgress,
    say_losses,
    say_sizes,
    say_tensors,
    say_unweighted,
)
from pyggml.cli.terminal.show import say
from pyggml.errors import ConfigError
from pyggml.lora import merge
from pyggml.lora.adapter.merge import update_counts
from pyggml.model import Model
from pyggml.requantize import FILE_TYPES, ROUNDINGS, PackingLosses, check_file_type, rewrite
from pyggml.requantize.imatrix import ImportanceMatrix, read_imatrix

_KEEP = "keep"


def _file_type(ctx: click.Context, param: click.Parameter, value: str) -> str | None:
    return None if value.lower() == _KEEP else check_file_type(value.upper())


@grouped_command(
    "merge",
    "pyggml merge -m model.gguf --lora adapter.gguf -o merged.gguf",
    "pyggml merge -m model.gguf --lora adapter.gguf -o merged.gguf --type Q4_K_M",
    "pyggml merge -m model.gguf --lora a.gguf:0.7 --lora b.gguf:0.3 -o both.gguf",
)
@model_option
@grouped_option(
    "model",
    "--lora",
    "adapter to merge; of several the updates add up; none: the model's numbers are written "
    "as they are, in the types asked for",
    **ADAPTERS,
)
@output_option(MODEL_FILE, "GGUF model to write")
@grouped_option(
    "output",
    "--type file_type",
    "file type of the output; keep: every tensor keeps its own type",
    metavar="TYPE",
    default=_KEEP,
    callback=_file_type,
)
@grouped_option(
    "output",
    "--rounding",
    "update: so that the updates are kept where they are smaller than the steps of a type; "
    "nearest: as llama.cpp packs the sums, byte for byte",
    type=click.Choice(ROUNDINGS),
    default=ROUNDINGS[0],
)
@click.option("--allow-requantize", is_flag=True, hidden=True)  # merging may, always
@IMATRIX
@TENSORS
@threads_option
def command(
    model: Path,
    lora: tuple[Adapter, ...] | None,
    output: Path,
    file_type: str | None,
    rounding: str,
    allow_requantize: bool,
    imatrix: Path | None,
    tensors: bool,
    threads: int,
) -> None:
    """Add adapters to the weights of a model, packed once; says how much of them is in it."""
    pyggml.threads.set(threads)
    adapters = lora or ()
    if imatrix and not adapters and file_type is None:
        raise ConfigError("--imatrix: nothing is packed without --lora or --type")
    opened = load(model, [*adapters])
    importance = read_imatrix(imatrix) if imatrix else None
    choice = choose_template(opened.tokenizer, adapters, None)
    losses = _write(
        opened, output, file_type, allow_requantize, importance, rounding, choice.metadata
    )
    if tensors:
        with gguf.open(output) as written:
            say_tensors(opened.file, written, losses, update_counts(opened))
    say_losses(
        losses, "" if rounding == ROUNDINGS[0] else f", and so does --rounding {ROUNDINGS[0]}"
    )
    say_unweighted(losses, importance)
    say_sizes(opened.file, output)
    say(_about(adapters, file_type))
    choice.say()


def _write(
    opened: Model,
    output: Path,
    file_type: str | None,
    allow_requantize: bool,
    importance: ImportanceMatrix | None,
    rounding: str,
    metadata: Mapping[str, str | None],
) -> PackingLosses:
    """Write the model with its adapters in its weights; without any, as it is."""
    show = RewriteProgress(opened.file)
    if opened.adapters:
        return merge(opened, output, file_type, show, importance, rounding, metadata)
    return rewrite(opened.file, output, file_type, {}, show, allow_requantize, importance)


def _about(adapters: Sequence[Adapter], file_type: str | None) -> str:
    if adapters:
        return f"with {', '.join(map(adapter_word, adapters))}"
    kind = f", as {file_type}" if file_type else ""
    return f"without an adapter (--lora): the model's own weights{kind}"


command.help = f"{command.help}\n\nTYPE is {_KEEP} or one of {', '.join(FILE_TYPES)}."
