"""`pyggml quantize`: what packing lost, and the sizes of both files."""

from contextlib import nullcontext
from pathlib import Path

import click

import pyggml.threads
from pyggml import gguf
from pyggml.cli.terminal.help import grouped_command, grouped_option
from pyggml.cli.terminal.hub import MODEL
from pyggml.cli.terminal.kinds import MODEL_FILE
from pyggml.cli.terminal.options import threads_option
from pyggml.cli.terminal.places import OutputPath
from pyggml.cli.terminal.rewriting import (
    IMATRIX,
    TENSORS,
    RewriteProgress,
    say_losses,
    say_sizes,
    say_tensors,
    say_unweighted,
)
from pyggml.requantize import FILE_TYPES, check_file_type, rewrite
from pyggml.requantize.imatrix import read_imatrix


@grouped_command(
    "quantize",
    "pyggml quantize model-F16.gguf model-Q4_K_M.gguf Q4_K_M",
    "pyggml quantize model-F16.gguf model-IQ2_S.gguf IQ2_S --imatrix imatrix.gguf",
    "pyggml quantize model-Q8_0.gguf model-Q4_0.gguf Q4_0 --allow-requantize",
)
@click.argument("source", metavar="IN.gguf", type=MODEL)
@click.argument("target", metavar="OUT.gguf", type=OutputPath(MODEL_FILE))
@click.argument(
    "file_type", metavar="TYPE", callback=lambda ctx, param, value: check_file_type(value.upper())
)
@threads_option
@grouped_option(
    "output",
    "--allow-requantize",
    "requantise: write another type than a quantised model has, whose error adds to that of "
    "the first quantisation",
    is_flag=True,
)
@IMATRIX
@grouped_option(
    "output",
    "--base",
    "the model before training, of a merged IN.gguf: rounded so that what was learned is kept",
    type=MODEL,
)
@TENSORS
def command(
    source: Path,
    target: Path,
    file_type: str,
    threads: int,
    allow_requantize: bool,
    imatrix: Path | None,
    base: Path | None,
    tensors: bool,
) -> None:
    """Pack the matrices of a model as TYPE, byte for byte as llama.cpp does without --base."""
    pyggml.threads.set(threads)
    with gguf.open(source) as file, gguf.open(base) if base else nullcontext() as before:
        importance = read_imatrix(imatrix) if imatrix else None
        losses = rewrite(
            file,
            target,
            file_type,
            progress=RewriteProgress(file),
            allow_requantize=allow_requantize,
            importance=importance,
            base=before,
        )
        if tensors:
            with gguf.open(target) as written:
                say_tensors(file, written, losses)
        say_losses(losses)
        say_unweighted(losses, importance)
        say_sizes(file, target)


command.help = f"{command.help}\n\nTYPE is one of {', '.join(FILE_TYPES)}."
