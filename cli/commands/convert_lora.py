"""`pyggml convert-lora`: an adapter of PEFT → one of llama.cpp, or back."""

from pathlib import Path

import click

from pyggml import gguf, load
from pyggml.chat.source import carries_template
from pyggml.cli.terminal.help import grouped_command, grouped_option
from pyggml.cli.terminal.kinds import ADAPTER
from pyggml.cli.terminal.options import model_option
from pyggml.cli.terminal.places import PATH, OutputPath
from pyggml.cli.terminal.show import plural, say, with_size
from pyggml.lora.peft import from_peft, to_peft
from pyggml.models.stack import LABELS, POOLING


@grouped_command(
    "convert-lora",
    "pyggml convert-lora -m model.gguf peft-folder adapter.gguf",
    "pyggml convert-lora -m model.gguf adapter.gguf peft-folder",
    "pyggml convert-lora -m model.gguf adapter.gguf peft --base-name Qwen/Qwen3-0.6B",
)
@click.argument("source", metavar="FROM", type=PATH)
@click.argument("target", metavar="TO", type=OutputPath(ADAPTER, may_be_folder=True))
@model_option
@grouped_option(
    "output",
    "--base-name",
    "the model's name or folder in transformers, for adapter_config.json",
    metavar="NAME",
)
def command(source: Path, target: Path, model: Path, base_name: str | None) -> None:
    """Convert an adapter: a PEFT folder to a GGUF file, or a GGUF file to a PEFT folder.

    The model says which matrices there are, and in which order its rows lie.
    """
    left_out = list[str]()
    if source.is_dir():
        ranks = from_peft(load(model), source, target)
        written = [target]
    else:
        ranks = to_peft(load(model), source, target, base_name)
        written = sorted(path for path in target.rglob("*") if path.is_file())
        left_out = _left_out(source)
    is_carried = carries_template(target if source.is_dir() else source)
    sizes = sorted(set(ranks.values()))
    said = f"rank {sizes[0]}" if len(sizes) == 1 else f"ranks {sizes[0]} to {sizes[-1]}"
    template = ", and the chat template" * is_carried
    say(f"{plural(len(ranks), 'module')} of {said}{template}")
    for path in written:
        say(with_size(path))
    for key in left_out:
        say(f"left out: {key}, for which PEFT has no place")


def _left_out(adapter: Path) -> list[str]:
    """The keys of an adapter's file that say what it is for, and are lost in a folder."""
    with gguf.open(adapter) as file:
        return [key for key in (LABELS, POOLING) if key in file.metadata]
