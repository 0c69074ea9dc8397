"""The options of `pyggml inspect`, and which parts of an inspection they ask for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyggml import gguf
from pyggml.cli.commands.inspect import facts, present
from pyggml.cli.commands.inspect.sections import Section, Table
from pyggml.cli.terminal.options import ADAPTERS, PATH, SETTINGS, ModelSource
from pyggml.cli.terminal.paths import check_output
from pyggml.cli.terminal.show import printable, say, size
from pyggml.errors import ConfigError

if TYPE_CHECKING:
    from pyggml.model import AdapterFile

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


@click.command("inspect", context_settings=SETTINGS)
@click.argument("given", metavar="FILE", type=PATH, required=False)
@click.option("-m", "--model", type=PATH, help="the same as FILE")
@click.option("--machine", is_flag=True, help="what computes on this machine, and why")
@click.option("--tensors", is_flag=True, help="every tensor, instead of equal ones folded")
@click.option("--template", is_flag=True, help="the text of the chat template")
@click.option("--rank", type=_number, metavar="N", help=f"of the LoRA that is costed  [{RANK}]")
@click.option("--plan", is_flag=True, help="memory of one pass of LoRA training; nothing is run")
@click.option("--graph", is_flag=True, help="the graph of that pass, with equal blocks folded")
@click.option("--tokens", is_flag=True, help="the loss of every token of a text (-f)")
@click.option("--gradients", is_flag=True, help="the gradients of a text's loss (-f), by layer")
@click.option("-f", "--file", "text", type=PATH, help="text for --tokens and --gradients")
@click.option("--lora", **ADAPTERS, help="adapter to read it with; several add up")
@click.option("--ctx", type=click.IntRange(min=2), metavar="N", help=f"tokens of a window  [{CTX}]")
@click.option("--batch", type=_number, default=BATCH, metavar="N", show_default=True)
@click.option("--grad-checkpointing", is_flag=True, help="with layers computed again")
@click.option("--html", type=PATH, metavar="PAGE", help="write all of it as a page, with pictures")
@click.option(
    "--json", "as_json", is_flag=True, help="print it for scripts (docs/looking-inside.md)"
)
def command(
    given: Path | None,
    model: Path | None,
    machine: bool,
    html: Path | None,
    as_json: bool,
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
    wanted = Inspection(path, lora=lora or (), **options)
    _check(wanted, given is not None and model is not None, html, as_json)
    if html is not None:
        check_output(html, [("file", path), ("text", wanted.text)])
    values, sections = _inspect(wanted)
    if as_json:
        say(json.dumps(values, allow_nan=False))
    elif html is not None:
        _write(html, present.head(values), sections)
    else:
        from pyggml.cli.commands.inspect.terminal import say_sections

        say_sections(present.head(values), sections)


def _check(wanted: Inspection, twice: bool, html: Path | None, as_json: bool) -> None:
    reads = [name for name in ("tokens", "gradients") if getattr(wanted, name)]
    faults = []
    if twice:
        faults.append("FILE and -m name two files, wanted one")
    if reads and wanted.text is None:
        faults.append(f"--{reads[0]} wants a text: -f TEXT")
    if wanted.text is not None and not reads:
        faults.append("-f is for --tokens and --gradients")
    if html is not None and as_json:
        faults.append("--html and --json are two ways to show it, wanted one")
    if faults:
        raise ConfigError(faults)


def _inspect(wanted: Inspection) -> tuple[dict[str, Any], list[Section]]:
    """All that was asked for, as plain values and as sections."""
    if wanted.file.suffix == ".dat":
        values = facts.dat_facts(wanted.file)
        return values, present.sections(values, None, wanted.template)
    with gguf.open(wanted.file) as file:
        values = facts.facts(file)
        if values["file"]["kind"] == "model":
            from pyggml.cli.commands.inspect.adaptable import adaptable

            values["lora"] = adaptable(file, wanted.rank or RANK)
        every = _tensors(file) if wanted.tensors else None
    more = [*_training(wanted, values), *_reading(wanted, values)]
    if not wanted.template:
        values.get("chat_template", {}).pop("text", None)
    sections = present.sections(values, every, wanted.template)
    return values, [*sections[:-1], *more, sections[-1]]


def _tensors(file: gguf.GGUFFile) -> Table:
    rows = [
        (t.name, t.dtype.name, present.shape(list(t.shape)), size(t.n_bytes))
        for t in file.tensors.values()
    ]
    return Table(("tensor", "type", "shape", "bytes"), rows, frozenset({3}))


def _training(wanted: Inspection, values: dict[str, Any]) -> list[Section]:
    """The plan and the graph; the plan's numbers also where a rank and a context are given."""
    costed = wanted.ctx is not None and wanted.rank is not None and "lora" in values
    if not (wanted.plan or wanted.graph or (costed and values["lora"]["buildable"])):
        return []
    from pyggml.cli.commands.inspect import training

    settings = training.Settings(
        wanted.rank or RANK, wanted.ctx or CTX, wanted.batch, wanted.grad_checkpointing
    )
    planned = training.plan_pass(ModelSource(wanted.file).load(), settings)
    values["plan"] = training.facts(planned)
    values["lora"]["plan"] = values["plan"]
    sections = training.plan_sections(planned) if wanted.plan else []
    return [*sections, *([training.graph_section(planned)] if wanted.graph else [])]


def _reading(wanted: Inspection, values: dict[str, Any]) -> list[Section]:
    if wanted.text is None:
        return []
    from pyggml.cli.commands.inspect import reading

    read = reading.read_text(wanted.file, wanted.lora, wanted.text, wanted.ctx or CTX)
    sections = []
    if wanted.tokens:
        table = reading.table_of(read)
        values["tokens"] = reading.token_facts(read, table)
        sections.append(reading.token_section(read, table))
    if wanted.gradients:
        overview = reading.gradients(read, wanted.rank or RANK)
        values["gradients"] = reading.gradient_facts(overview)
        sections.append(reading.gradient_section(overview))
    return sections


def _write(path: Path, title: str, sections: Sequence[Section]) -> None:
    from pyggml.cli.commands.inspect import html as html_page

    html_page.write(path, title, sections)
    say(f"{printable(str(path))}: {size(path.stat().st_size)}")
