"""`pyggml view`: the options, and what starts the server."""

from pathlib import Path

import click

from pyggml.cli.terminal.help import grouped_command, grouped_option
from pyggml.cli.terminal.hub import MODEL
from pyggml.cli.terminal.options import compute_option, threads_option
from pyggml.cli.terminal.places import PATH
from pyggml.cli.web.listening import check_packages, listening
from pyggml.errors import ConfigError

HOST = "127.0.0.1"


@grouped_command(
    "view",
    "pyggml view model.gguf",
    "pyggml view model.gguf --run FOLDER",
    "pyggml view --run FOLDER",
    quiet="line of where the page is",
)
@click.argument("given", metavar="[MODEL]", type=MODEL, required=False)
@grouped_option("model", "-m --model", "the same as MODEL", type=MODEL)
@grouped_option(
    "data",
    "--run runs",
    "folder of adapters whose runs are shown, finished ones and those under way; without "
    "MODEL beside the model of the newest, if that is there",
    type=PATH,
    metavar="FOLDER",
    brief="folder of adapters whose runs are shown",
)
@grouped_option(
    "server",
    "--port",
    "port; 0 takes a free one  [default: 8090]",
    type=click.IntRange(0, 65535),
    default=8090,
)
@threads_option
@compute_option
def command(
    given: Path | None, model: Path | None, runs: Path | None, port: int, threads: int, compute: str
) -> int:
    """Browse a model, its graph, its memory plan and its runs, in a browser on this machine.

    Nothing is written, and nobody else can connect.
    """
    check_packages("view", "starlette", "uvicorn", "igraph")
    path = given or model
    if (path is None and runs is None) or (given and model):
        raise ConfigError("wanted one MODEL, any GGUF file, or --run FOLDER, or both")
    from pyggml.cli.commands.view.runs import Runs
    from pyggml.cli.commands.view.source import ViewedFile, source_of_run

    shown = None if runs is None else Runs(runs)
    newest = None if shown is None else shown.model()
    source = source_of_run(newest, compute) if path is None else ViewedFile(path, compute)
    with listening(HOST, port) as opened:
        from pyggml.cli.commands.view.startup import run

        return run(opened, source, shown, threads)
