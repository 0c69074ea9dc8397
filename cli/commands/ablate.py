"""`pyggml ablate`: heads and neurons of a model → the adapter that takes them away."""

import re
from collections.abc import Sequence
from pathlib import Path

import pyggml.threads
from pyggml import lab, load
from pyggml.cli.terminal.help import grouped_command, grouped_option
from pyggml.cli.terminal.kinds import ADAPTER
from pyggml.cli.terminal.options import Names, model_option, output_option, threads_option
from pyggml.cli.terminal.show import row, with_size
from pyggml.errors import ConfigError
from pyggml.lora import combine
from pyggml.models import LoraPairs

_PLACE = re.compile(r"([0-9]{1,5})\.([0-9]{1,6})")


@grouped_command(
    "ablate",
    "pyggml ablate -m model.gguf --heads 6.4 -o no-head.gguf",
    "pyggml ablate -m model.gguf --heads 6.4,7.0 --neurons 3.117 -o less.gguf",
    'pyggml generate -m model.gguf --lora no-head.gguf -p "..."',
)
@model_option
@grouped_option(
    "output",
    "--heads",
    "attention heads to take away: block and head, as 6.4",
    type=Names(),
    metavar="A.B,C.D",
)
@grouped_option(
    "output",
    "--neurons",
    "neurons of feed-forward parts to take away: block and neuron, as 3.117",
    type=Names(),
    metavar="A.B,C.D",
)
@output_option(ADAPTER, "adapter to write")
@threads_option
def command(
    model: Path,
    heads: Sequence[str] | None,
    neurons: Sequence[str] | None,
    output: Path,
    threads: int,
) -> None:
    """Write the adapter that takes heads and neurons of a model away, as llama.cpp loads it."""
    if not heads and not neurons:
        raise ConfigError("wanted --heads or --neurons to take away")
    pyggml.threads.set(threads)
    opened = load(model)
    updates: LoraPairs = {}
    if heads:
        updates = {**lab.without_heads(opened, _places("--heads", heads))}
    if neurons:
        updates = {**updates, **lab.without_neurons(opened, _places("--neurons", neurons))}
    combine(opened.with_adapters(updates), output)
    ranks = ", ".join(f"{name.removesuffix('.weight')} {p.rank}" for name, p in updates.items())
    row("ranks", ranks)
    row("adapter", with_size(output))


def _places(option: str, words: Sequence[str]) -> dict[int, list[int]]:
    """{block: numbers} of words such as 6.4."""
    places: dict[int, list[int]] = {}
    for word in words:
        match = _PLACE.fullmatch(word)
        if match is None:
            raise ConfigError(f"{option} has {word!r:.40}, wanted a block and a number, as 6.4")
        places.setdefault(int(match[1]), []).append(int(match[2]))
    return places
