"""`pyggml combine`: several adapters of a model → one adapter, and what its rank leaves out."""

from pathlib import Path
from typing import Any

import click
import numpy as np

import pyggml.threads
from pyggml import load
from pyggml.cli.terminal.chat_templates import choose_template
from pyggml.cli.terminal.exit import end_if_signalled
from pyggml.cli.terminal.help import GroupedCommand
from pyggml.cli.terminal.kinds import ADAPTER
from pyggml.cli.terminal.options import (
    ADAPTERS,
    SETTINGS,
    adapter_word,
    in_group,
    model_option,
    threads_option,
)
from pyggml.cli.terminal.places import OutputPath
from pyggml.cli.terminal.progress import ChangingLine
from pyggml.cli.terminal.show import percent, say, size
from pyggml.errors import ConfigError
from pyggml.lora import combine
from pyggml.lora.adapter.combine import METHODS, Method

_LORA: dict[str, Any] = {**ADAPTERS, "required": True}
_DENSITY = 0.5


class _Progress:
    """One line that changes on a terminal, nothing elsewhere."""

    def __init__(self) -> None:
        self._line = ChangingLine()

    def __call__(self, done: int, n: int) -> None:
        end_if_signalled()
        self._line.show(f"{done} of {n} tensors" if done < n else "")


@click.command(
    "combine",
    cls=GroupedCommand,
    context_settings=SETTINGS,
    examples=[
        "pyggml combine -m m.gguf --lora a.gguf:0.7 --lora b.gguf:0.3 -o both.gguf",
        "pyggml combine -m m.gguf --lora a.gguf --lora b.gguf -o both.gguf --method ties",
        "pyggml combine -m m.gguf --lora large.gguf -o small.gguf --rank 8",
    ],
)
@model_option
@click.option("--lora", **_LORA, **in_group("model"), help="adapter, and its weight; several")
@click.option(
    "-o",
    "--output",
    type=OutputPath(ADAPTER),
    required=True,
    **in_group("output"),
    help="adapter to write",
)
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default=METHODS[0],
    show_default=True,
    metavar="WORD",
    **in_group("output"),
    help="sum: of the updates times their weights; ties: of each its largest numbers, where their "
    "signs agree; dare: of each some numbers at random, divided by their "
    "share",
)
@click.option(
    "--rank",
    type=click.IntRange(min=1),
    metavar="N",
    **in_group("output"),
    help="rank of the result, which leaves out the smallest singular values (default: all of a "
    "sum, else the largest rank of an adapter)",
)
@click.option(
    "--density",
    type=float,
    metavar="SHARE",
    **in_group("output"),
    help=f"share of numbers that ties and dare keep of each adapter (default: {_DENSITY})",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    metavar="N",
    **in_group("output"),
    help="seed of what dare keeps (default: 0)",
)
@threads_option
def command(
    model: Path,
    lora: tuple[tuple[Path, float], ...],
    output: Path,
    method: Method,
    rank: int | None,
    density: float | None,
    seed: int | None,
    threads: int,
) -> None:
    """Make one adapter of several, as llama.cpp loads it; says what its rank leaves out."""
    if method == "sum" and density is not None:
        raise ConfigError("--density: for --method ties or dare; a sum keeps all numbers")
    if method != "dare" and seed is not None:
        raise ConfigError(f"--seed: for --method dare; {method} draws nothing")
    pyggml.threads.set(threads)
    opened = load(model, [*lora])
    choice = choose_template(opened.tokenizer, (path for path, _ in lora), None)
    kept = _DENSITY if density is None else density
    left_out = combine(opened, output, method, rank, kept, seed or 0, choice.metadata, _Progress())
    worst = max(left_out, key=lambda name: left_out[name])
    if left_out[worst]:
        mean = float(np.sqrt(np.mean(np.square([*left_out.values()]))))
        most = f"most {percent(left_out[worst])}, {worst}"
        say(f"rank       leaves {percent(mean)} out, root mean square; {most}")
    say(f"adapter    {output}, {size(output.stat().st_size)}")
    say(f"of {', '.join(adapter_word(given) for given in lora)}")
    choice.say()
