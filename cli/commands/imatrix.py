"""`pyggml imatrix`: a model and a text → the importance of its matrices' columns."""

from pathlib import Path

import click

from pyggml.cli.terminal.chunks import chunk_option, held_out_option
from pyggml.cli.terminal.help import GroupedCommand
from pyggml.cli.terminal.options import PATH, SETTINGS, ModelSource, in_group, model_options
from pyggml.cli.terminal.paths import check_output, check_text
from pyggml.cli.terminal.progress import Countdown
from pyggml.cli.terminal.show import plural, say, say_progress, size
from pyggml.errors import DataError
from pyggml.lora.evaluate.importance import Collector


@click.command(
    "imatrix",
    cls=GroupedCommand,
    context_settings=SETTINGS,
    examples=[
        "pyggml imatrix -m model-F16.gguf -f calibration.txt -o imatrix.gguf",
        "pyggml imatrix -m model-F16.gguf -f calibration.txt -o imatrix.gguf --chunks 100",
        "pyggml quantize model-F16.gguf model-Q4_K_M.gguf Q4_K_M --imatrix imatrix.gguf",
    ],
)
@model_options
@held_out_option("calibration data, UTF-8 text")
@click.option(
    "-o", "--output", type=PATH, required=True, **in_group("output"), help="GGUF file to write"
)
@chunk_option(least=16)
@click.option(
    "--chunks",
    type=click.IntRange(min=1),
    metavar="N",
    **in_group("data"),
    help="most chunks to read (default: all)",
)
def command(source: ModelSource, text: Path, output: Path, ctx: int, chunks: int | None) -> None:
    """Compute an importance matrix from calibration data, for quantize --imatrix.

    The file is llama.cpp's.
    """
    inputs = [("model", source.path), ("text", text)]
    inputs += [("adapter", path) for path, _ in source.adapters]
    check_text([text])
    check_output(output, inputs)
    opened = source.load()
    try:
        collector = Collector(opened, _read(text), ctx, chunks, text.name)
    except DataError as error:
        raise DataError(f"{text}: {error}; a smaller --ctx needs less") from None
    say_progress(f"{plural(collector.n_chunks, 'chunk')} of {ctx} tokens")
    time = Countdown()
    for n in collector.run():
        time.say_left(n, collector.n_chunks)
    matrix = collector.result(n)
    matrix.save(output)
    n_rare = sum(bool((s.counts == 0).any()) for s in matrix.sums.values())
    rare = f", {n_rare} with experts that no token asked" if n_rare else ""
    say(f"{plural(len(matrix.sums), 'matrix', 'matrices')}{rare}")
    say(f"{output}, {size(output.stat().st_size)}")


def _read(path: Path) -> str:
    """A text as llama.cpp's -f reads it: a last line end is dropped."""
    try:
        return path.read_bytes().decode("utf-8").removesuffix("\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is no UTF-8: {error.reason} at byte {error.start}") from None
