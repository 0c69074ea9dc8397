"""`pyggml quantize`: one line a tensor, then the sizes of both files."""

from __future__ import annotations

from math import prod
from pathlib import Path

import click

import pyggml.threads
from pyggml import gguf
from pyggml.cli.options import PATH, SETTINGS, threads_option
from pyggml.cli.paths import check_output
from pyggml.cli.show import printable, say, size
from pyggml.dtypes import DType
from pyggml.quants import FILE_TYPES
from pyggml.requantize import requantize


@click.command("quantize", context_settings=SETTINGS)
@click.argument("source", metavar="IN.gguf", type=PATH)
@click.argument("target", metavar="OUT.gguf", type=PATH)
@click.argument("file_type", metavar="TYPE")
@threads_option
@click.option(
    "--allow-requantize",
    is_flag=True,
    help="also of a model that is quantised already, which loses twice",
)
def command(
    source: Path, target: Path, file_type: str, threads: int, allow_requantize: bool
) -> None:
    """Pack the matrices of a model as TYPE, byte for byte as llama.cpp does."""
    check_output(target, [("file to read from", source)])
    pyggml.threads.set(threads)
    with gguf.open(source) as file:
        infos, n_before = dict(file.tensors), file.n_bytes
    number = iter(range(1, len(infos) + 1))

    def show(name: str, old: DType, new: DType) -> None:
        shape, before = infos[name].shape, infos[name].n_bytes
        after = prod(shape[:-1]) * new.row_bytes(shape[-1])
        sizes = f"{size(before)} → {size(after)}"
        kept = old is new
        say(
            f"[{next(number):4}/{len(infos)}] {printable(name):<32} {shape!s:<16} "
            + (f"{old.name} kept" if kept else f"{old.name} → {new.name}, {sizes}")
        )

    requantize(source, target, file_type.upper(), show, allow_requantize)
    n_after = target.stat().st_size
    share = f"{100 * n_after / n_before:.0f} %"
    say(f"{source}: {size(n_before)}\n{target}: {size(n_after)}, {share}")


command.help = f"{command.help}\n\nTYPE is one of {', '.join(FILE_TYPES)}."
