"""`pyggml extract`: two models → the adapter of their difference, and what its rank leaves out."""

from pathlib import Path

import click

import pyggml.threads
from pyggml import load
from pyggml.cli.commands.combine import TensorLine, mean_and_most, ranks_of
from pyggml.cli.terminal.help import grouped_command, grouped_option
from pyggml.cli.terminal.hub import model_file
from pyggml.cli.terminal.kinds import ADAPTER
from pyggml.cli.terminal.options import model_option, output_option, threads_option
from pyggml.cli.terminal.places import PATH
from pyggml.cli.terminal.show import percent, row, with_size
from pyggml.errors import first_names
from pyggml.lora import Combination, extract

_RANK = 16


@grouped_command(
    "extract",
    "pyggml extract -m base.gguf --from trained.gguf -o adapter.gguf",
    "pyggml extract -m base.gguf --from trained.gguf -o adapter.gguf --rank 64",
    "pyggml extract -m base.gguf --from trained.gguf -o adapter.gguf --error 0.1",
)
@model_option
@grouped_option(
    "model",
    "--from trained",
    "model that the adapter shall make of --model: trained in full, merged, or another type",
    type=PATH,
    required=True,
)
@output_option(ADAPTER, "adapter to write")
@grouped_option(
    "output",
    "--rank",
    f"rank of the adapter, at most that of each matrix  [default: {_RANK}]",
    type=click.IntRange(min=1),
)
@grouped_option(
    "output",
    "--error",
    "in place of a rank: the share of each difference, by its root mean square, that may be "
    "left out; the rank is the lowest that does, tensor by tensor",
    type=click.FloatRange(min=0, max=1, max_open=True),
)
@threads_option
def command(
    model: Path, trained: Path, output: Path, rank: int | None, error: float | None, threads: int
) -> None:
    """Make the adapter that turns one model nearly into another; says what it leaves out."""
    how = Combination(rank=_RANK if rank is None and error is None else rank, error=error)
    pyggml.threads.set(threads)
    base, other = load(model), load(model_file(trained))
    result = extract(base, other, output, how, TensorLine())
    mean, most = mean_and_most(result.left_out)
    row("rank", f"{ranks_of(output)} leaves {mean} of the difference out; {most}")
    if result.not_held:
        largest = max(result.not_held, key=lambda name: result.not_held[name])
        row(
            "not held",
            f"{first_names([*result.not_held], 3)}: no adapter updates them; most changed is "
            f"{largest}, by {percent(result.not_held[largest])} of its numbers",
        )
    row("adapter", with_size(output))
