"""The options of `pyggml inspect`, and which parts of an inspection they ask for."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyggml import gguf
from pyggml.cli.commands.inspect import facts, present
from pyggml.cli.commands.inspect.sections import CellTable, ReportSection
from pyggml.cli.terminal.help import grouped_command, grouped_option
from pyggml.cli.terminal.hub import MODEL
from pyggml.cli.terminal.kinds import PAGE
from pyggml.cli.terminal.options import ADAPTERS, ModelSource
from pyggml.cli.terminal.places import PATH, OutputPath
from pyggml.cli.terminal.show import say, size
from pyggml.errors import ConfigError

if TYPE_CHECKING:
    from pyggml.models.adapter import AdapterFile

RANK, CTX, BATCH = 8, 256, 1  # LoraConfig's, DataConfig's and TrainConfig's; tests compare them


@dataclass(frozen=True, slots=True)
class Inspection:
    """What to look at, and how."""

    file: Path
    tensors: bool
    template: bool
    rank: int | None
    ctx: int | None
    batch: int
    grad_checkpointing: bool
    plan: bool
    graph: bool
    tokens: bool
    gradients: bool
    text: Path | None
    lora: Sequence[AdapterFile]


_number = click.IntRange(min=1)


def _flag(name: str, help: str, group: str = "output") -> Any:
    return grouped_option(group, name, help, is_flag=True)


@grouped_command(
    "inspect",
    "pyggml inspect model.gguf --tensors",
    "pyggml inspect model.gguf --plan --rank 16 --ctx 1024",
    "pyggml inspect model.gguf --tokens -f text.txt --html page.html",
)
@click.argument("given", metavar="FILE", type=MODEL, required=False)
@grouped_option("model", "-m --model", "the same as FILE", type=MODEL)
@_flag("--machine", "what computes on this machine, and why", "help")
@_flag("--tensors", "every tensor, instead of equal ones folded")
@_flag("--template", "the text of the chat template")
@_flag("--raw", "the same as it stands in the file, to be kept as one: --template --raw > a.jinja")
@_flag("--plan", "memory of one pass of LoRA training; nothing is run")
@_flag("--graph", "the graph of that pass, with equal blocks folded")
@_flag("--tokens", "the loss of every token of a text (-f)")
@_flag("--gradients", "the gradients of a text's loss (-f), by layer")
@grouped_option("data", "-f --file text", "text for --tokens and --gradients", type=PATH)
@grouped_option("model", "--lora", "adapter to read it with; several add up", **ADAPTERS)
@grouped_option(
    "adapter",
    "--rank",
    f"rank of the LoRA adapter whose training is planned  [default: {RANK}]",
    type=_number,
    aliases=("lora-rank", "lora-r"),
)
@grouped_option(
    "data",
    "--ctx",
    f"tokens of a training sequence (window)  [default: {CTX}]",
    type=click.IntRange(min=2),
)
@grouped_option("data", "--batch", "windows in one pass", type=_number, default=BATCH)
@_flag("--grad-checkpointing", "plan with gradient checkpointing", "memory")
@grouped_option(
    "output",
    "--html",
    "write all of it as a page, with pictures",
    type=OutputPath(PAGE),
    metavar="PAGE",
)
@_flag("--json as_json", "print it as JSON (docs/looking-inside.md)")
def command(
    given: Path | None,
    model: Path | None,
    machine: bool,
    html: Path | None,
    as_json: bool,
    raw: bool,
    lora: Any,
    **options: Any,
) -> None:
    """What is in a GGUF file, and what training it would take.

    Models, adapters, importance matrices and vocabularies, also in several parts.
    """
    if machine:
        from pyggml.cli.commands.inspect.machine import say_machine

        say_machine()
    path = given or model
    if path is None:
        if not machine:
            raise ConfigError("wanted a FILE or --machine")
        return
    if raw:
        return _write_template(path, options["template"])
    asked = Inspection(path, lora=lora or (), **options)
    _check(asked, given is not None and model is not None, html, as_json)
    values, sections = _inspect(asked)
    if as_json:
        say(json.dumps(values, allow_nan=False))
    elif html is not None:
        _write(html, present.head(values), sections)
    else:
        from pyggml.cli.commands.inspect.terminal import say_sections

        say_sections(present.head(values), sections)


def _write_template(path: Path, is_wanted: bool) -> None:
    """Write the text of a file's chat template, and nothing else."""
    if not is_wanted:
        raise ConfigError("--raw wants --template, the text that it writes")
    with gguf.open(path) as file:
        template = facts.facts(file).get("chat_template")
    if template is None:
        raise ConfigError(f"{path}: has no chat template")
    say(template["text"], end="", as_is=not sys.stdout.isatty())


def _check(asked: Inspection, twice: bool, html: Path | None, as_json: bool) -> None:
    reads = [name for name in ("tokens", "gradients") if getattr(asked, name)]
    faults = []
    if twice:
        faults.append("FILE and -m name two files, wanted one")
    if reads and asked.text is None:
        faults.append(f"--{reads[0]} wants a text: -f TEXT")
    if asked.text is not None and not reads:
        faults.append("-f is for --tokens and --gradients")
    if html is not None and as_json:
        faults.append("--html and --json are two ways to show it, wanted one")
    if faults:
        raise ConfigError(faults)


def _inspect(asked: Inspection) -> tuple[dict[str, Any], list[ReportSection]]:
    """All that was asked for, as plain values and as sections."""
    if asked.file.suffix == ".dat":
        values = facts.dat_facts(asked.file)
        return values, present.sections(values, None, asked.template)
    with gguf.open(asked.file) as file:
        values = facts.facts(file)
        if values["file"]["kind"] == "model":
            from pyggml.cli.commands.inspect.adaptable import adaptable

            values["lora"] = adaptable(file, asked.rank or RANK)
        every = _tensors(file) if asked.tensors else None
    more = [*_training(asked, values), *_reading(asked, values)]
    if not asked.template:
        values.get("chat_template", {}).pop("text", None)
    sections = present.sections(values, every, asked.template)
    return values, [*sections[:-1], *more, sections[-1]]


def _tensors(file: gguf.GGUFFile) -> CellTable:
    rows = [
        (t.name, t.dtype.name, present.shape(list(t.shape)), size(t.n_bytes))
        for t in file.tensors.values()
    ]
    return CellTable(("tensor", "type", "shape", "bytes"), rows, frozenset({3}))


def _training(asked: Inspection, values: dict[str, Any]) -> list[ReportSection]:
    """The plan and the graph; the plan's numbers also where a rank and a context are given."""
    costed = asked.ctx is not None and asked.rank is not None and "lora" in values
    if not (asked.plan or asked.graph or (costed and values["lora"]["buildable"])):
        return []
    from pyggml.cli.commands.inspect import training

    settings = training.PlanSettings(
        asked.rank or RANK, asked.ctx or CTX, asked.batch, asked.grad_checkpointing
    )
    planned = training.plan_pass(ModelSource(asked.file).load(), settings)
    values["plan"] = training.facts(planned)
    values["lora"]["plan"] = values["plan"]
    sections = training.plan_sections(planned) if asked.plan else []
    return [*sections, *([training.graph_section(planned)] if asked.graph else [])]


def _reading(asked: Inspection, values: dict[str, Any]) -> list[ReportSection]:
    if asked.text is None:
        return []
    from pyggml.cli.commands.inspect import reading
    from pyggml.look.lens import token_table
    from pyggml.lora.record import gradients_record

    read = reading.read_text(asked.file, asked.lora, asked.text, asked.ctx or CTX)
    sections = []
    if asked.tokens:
        table = token_table(read.model, read.ids)
        values["tokens"] = reading.token_facts(read, table)
        sections.append(reading.token_section(read, table))
    if asked.gradients:
        overview = reading.gradients(read, asked.rank or RANK)
        values["gradients"] = gradients_record(overview)
        sections.append(reading.gradient_section(overview))
    return sections


def _write(path: Path, title: str, sections: Sequence[ReportSection]) -> None:
    from pyggml.cli.commands.inspect import html as html_page

    html_page.write(path, title, sections)
    say(f"{path}: {size(path.stat().st_size)}")
