"""`pyggml quantize`: one line a tensor, then the sizes of both files."""

from pathlib import Path

import click

import pyggml.threads
from pyggml import gguf
from pyggml.cli.terminal.help import GroupedCommand
from pyggml.cli.terminal.hub import MODEL
from pyggml.cli.terminal.options import PATH, SETTINGS, threads_option
from pyggml.cli.terminal.paths import check_output
from pyggml.cli.terminal.rewriting import ALLOW_REQUANTIZE, IMATRIX, say_sizes, tensor_lines
from pyggml.requantize import FILE_TYPES, rewrite
from pyggml.requantize.imatrix import read_imatrix


@click.command(
    "quantize",
    cls=GroupedCommand,
    context_settings=SETTINGS,
    examples=[
        "pyggml quantize model-F16.gguf model-Q4_K_M.gguf Q4_K_M",
        "pyggml quantize model-F16.gguf model-IQ2_S.gguf IQ2_S --imatrix imatrix.gguf",
        "pyggml quantize model-Q8_0.gguf model-Q4_0.gguf Q4_0 --allow-requantize",
    ],
)
@click.argument("source", metavar="IN.gguf", type=MODEL)
@click.argument("target", metavar="OUT.gguf", type=PATH)
@click.argument("file_type", metavar="TYPE")
@threads_option
@ALLOW_REQUANTIZE
@IMATRIX
def command(
    source: Path,
    target: Path,
    file_type: str,
    threads: int,
    allow_requantize: bool,
    imatrix: Path | None,
) -> None:
    """Pack the matrices of a model as TYPE, byte for byte as llama.cpp does."""
    check_output(target, [("file to read from", source), ("importance matrix", imatrix)])
    pyggml.threads.set(threads)
    with gguf.open(source) as file:
        importance = read_imatrix(imatrix) if imatrix else None
        show = tensor_lines(file)
        rewrite(file, target, file_type.upper(), {}, show, allow_requantize, importance)
        say_sizes(file, target)


command.help = f"{command.help}\n\nTYPE is one of {', '.join(FILE_TYPES)}."
