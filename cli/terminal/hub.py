"""Names of the hub where a command takes a path: a model's, or hub:… of data."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from pyggml import hub
from pyggml.cli.terminal.places import InputPath
from pyggml.cli.terminal.show import is_quiet, say_progress


class ModelPath(InputPath):
    """A GGUF file, or the name of a model on the hub, whose file it becomes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return model_file(Path(str(super().convert(value, param, ctx))))


MODEL = ModelPath()


def model_file(path: Path) -> Path:
    """The path; for a name of the hub, the model's file, whose path is printed."""
    if not hub.is_model_name(str(path)):
        return path
    return _fetch(str(path), lambda: [hub.model_path(str(path))])[0]


def data_files(path: Path, splits: Sequence[str] = hub.TRAINING) -> list[Path]:
    """The path; for a data set of the hub, its files, whose paths are printed."""
    if not str(path).startswith(hub.SCHEME):
        return [path]
    return _fetch(str(path), lambda: hub.data_paths(str(path), splits))


def held_out_files(
    ctx: click.Context, param: click.Parameter, value: Iterable[Path]
) -> tuple[Path, ...]:
    """The callback of an option of data to evaluate with: of the hub, what is held out there."""
    splits = (*hub.HELD_OUT, *hub.TRAINING)
    return tuple(file for path in value for file in data_files(path, splits))


def _fetch(word: str, fetch: Callable[[], list[Path]]) -> list[Path]:
    if is_quiet():
        hub.hide_progress()
    files = fetch()
    for file in files:
        say_progress(f"{word}: {file}")
    return files
