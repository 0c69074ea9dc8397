"""Options of data that is read and not trained on: what they name → files.

Named are files, folders, patterns, pipes and data sets of the hub, as many as there are. Their rows
are those of training: `pyggml.lora.data` reads them.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from pyggml.cli.terminal.help import F, GroupedOption, grouped_option
from pyggml.cli.terminal.hub import held_out_files
from pyggml.cli.terminal.options import settings_options
from pyggml.cli.terminal.places import PATH
from pyggml.cli.terminal.show import note
from pyggml.lora.config import EvalConfig


def data_option(
    about: str, names: str = "-f --file files", group: str = "data", required: bool = True
) -> Callable[[F], F]:
    """An option that takes data several times."""
    return grouped_option(
        group,
        names,
        f"{about}; a folder or pattern of these; may be given several times",
        type=PATH,
        multiple=True,
        required=required,
        callback=held_out_files,
        metavar="DATA",
    )


def columns_option() -> GroupedOption:
    """--columns, as `eval` has it."""
    without = [field.name for field in fields(EvalConfig) if field.name != "columns"]
    return settings_options(EvalConfig, {}, without)[0]


def data_files(data: Sequence[Path], columns: Sequence[str] | None = None) -> list[Path]:
    """The files of what was named; what of folders is left out is said. Errors are training's."""
    from pyggml.lora.evaluate.rows import files_of  # a command that is given none need not load it

    files, left_out = files_of(data, columns)
    for path, reason in left_out:
        note(f"{path} is left out: it {reason}")
    return files
