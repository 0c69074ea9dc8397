"""What commands that write a model again have in common: a line for each tensor, and both sizes."""

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType

import click

from pyggml.cli.terminal.options import PATH, grouped
from pyggml.cli.terminal.show import plural, printable, progress_lines, say, size
from pyggml.gguf import GGUFFile
from pyggml.graph.dtypes import DType

ALLOW_REQUANTIZE = click.option(
    "--allow-requantize",
    is_flag=True,
    **grouped("output"),
    help="requantise: write another type than a quantised model has, whose error adds to that of "
    "the first quantisation",
)
IMATRIX = click.option(
    "--imatrix",
    type=PATH,
    **grouped("output"),
    help="importance matrix, by pyggml imatrix or llama.cpp (Q4 to Q5, K-quants and IQ types use "
    "it)",
)


def tensor_lines(
    file: GGUFFile, n_updates: Mapping[str, int] = MappingProxyType({})
) -> Callable[[str, DType, DType], None]:
    """The `progress` of `rewrite` that prints a line; n_updates: those of a tensor by adapters."""
    number = iter(range(1, len(file.tensors) + 1))

    def show(name: str, old: DType, new: DType) -> None:
        info, n = file.tensors[name], n_updates.get(name, 0)
        after = prod(info.shape[:-1]) * new.row_bytes(info.shape[-1])
        said = f"{old.name} kept"
        if old is not new:
            said = f"{old.name} → {new.name}, {size(info.n_bytes)} → {size(after)}"
        more = f", {plural(n, 'update')}" if n else ""
        with progress_lines():
            say(
                f"[{next(number):4}/{len(file.tensors)}] {printable(name):<32} {info.shape!s:<16} "
                f"{said}{more}"
            )

    return show


def say_sizes(file: GGUFFile, target: Path) -> None:
    """The sizes of the file that was read and of that written."""
    n_before, n_after = file.n_bytes, target.stat().st_size
    share = f"{100 * n_after / n_before:.0f} %"
    say(f"{file.path}: {size(n_before)}\n{target}: {size(n_after)}, {share}")
