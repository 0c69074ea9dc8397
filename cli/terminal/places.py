"""One rule for the files of all commands: an output is no input, and replaces only its own kind.

The type of a parameter says what it names: files to read (`Reads`), or a file of some kind that is
written (`OutputPath`). Every command asks `check_places` before it begins. What it writes

    is none of the files that it reads, whatever the names: --force changes nothing of that
    replaces a file that is there if that is of the kind that it writes, and says so
    replaces any other file with --force
"""

import glob
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import click

from pyggml.cli.terminal.kinds import FileKind
from pyggml.cli.terminal.paths import check_output
from pyggml.errors import ConfigError

_MOST_FILES = 1 << 16  # of a folder: training reads none that has more
_PART = re.compile(r"(.*)-[0-9]{5}-of-([0-9]{5})\.gguf", re.DOTALL)  # of a model in several files
# What is said of a parameter's file where its name says too little.
_WORDS = {
    "below": "adapter",
    "data": "text",
    "files": "text",
    "given": "model",
    "imatrix": "importance matrix",
    "init": "adapter",
    "lora": "adapter",
    "others": "model",
    "resume": "checkpoint",
    "source": "file to read from",
    "val_file": "text held out",
}


class Reads:
    """Of a parameter's type: its value has the paths of files to read, a text is one itself."""


class WordType(click.ParamType, ABC):
    """Of a parameter whose word is read further; what was read already, of the type `of`, stays."""

    of: type = type(None)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if isinstance(value, self.of) else self.read(value)

    @abstractmethod
    def read(self, value: Any) -> Any:
        """What a word stands for. Raises click.BadParameter, or an error of the command's own."""


class InputPath(Reads, click.Path):
    """A file or folder that is read."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)


class FileWord(Reads, click.types.StringParamType):
    """A word that is a name, or the path of a file to read."""


class OutputPath(click.Path):
    """A file to write, of a kind. may_be_folder: or a new folder, if the command writes one."""

    def __init__(self, kind: FileKind, may_be_folder: bool = False) -> None:
        super().__init__(path_type=Path)
        self.kind, self.may_be_folder = kind, may_be_folder

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path. ConfigError for `.` and `/`, beside which nothing could be named, and for `-`,
        which elsewhere is standard output."""
        if value == "-":
            raise ConfigError("-: standard output takes no file, wanted the name of one to write")
        path: Any = super().convert(value, param, ctx)
        if not (path.name or self.may_be_folder):
            raise ConfigError(f"{path}: is a folder, wanted the name of a file to write")
        return path


class OutputFolder(click.Path):
    """A folder to write to, whose command asks `check_places` of each file."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)


PATH = InputPath()


@dataclass(frozen=True, slots=True)
class Output:
    """A file to write. stays: one of its kind that is there is gone on with, or set aside."""

    path: Path
    kind: FileKind
    may_be_folder: bool = False
    stays: bool = False


def outputs_of(parameters: Iterable[click.Parameter], values: Mapping[str, Any]) -> list[Output]:
    """What parameters of these values name to write."""
    return [
        Output(values[p.name], p.type.kind, p.type.may_be_folder)
        for p in parameters
        if isinstance(p.type, OutputPath) and values.get(p.name or "") is not None
    ]


def inputs_of(
    parameters: Iterable[click.Parameter], values: Mapping[str, Any]
) -> list[tuple[str, Path]]:
    """What they name to read: a word for it, and a path."""
    return [
        (_WORDS.get(parameter.name or "", str(parameter.name).replace("_", " ")), path)
        for parameter in parameters
        if isinstance(parameter.type, Reads)
        for path in _paths(values.get(parameter.name or ""), isinstance(parameter.type, FileWord))
    ]


def _paths(value: Any, words: bool) -> Iterator[Path]:
    """The paths in the value of a parameter, such as adapters with their weights."""
    if isinstance(value, Path):
        yield value
    elif isinstance(value, str) and words and "\0" not in value:
        yield Path(value)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _paths(part, words)


def check_places(
    outputs: Sequence[Output],
    inputs: Sequence[tuple[str, Path]],
    force: bool = False,
    makes_folder: bool = True,
) -> None:
    """ConfigError for an output that cannot be written, is read, or would replace a file of another
    kind.

    makes_folder: whether the folder is created that an output is to lie in, which is said
    """
    read = inputs if outputs else ()
    by_place = {_place(each): word for word, path in read for each in _files(path)}
    for output in outputs:
        word = by_place.get(_place(output.path))
        if word:
            raise ConfigError(f"{output.path}: is the {word}, wanted another name to write to")
        if not (output.may_be_folder and output.path.is_dir()):
            check_output(output.path, makes_folder)
            if output.path.exists() and not (force or output.kind.is_one(output.path)):
                raise ConfigError(
                    f"{output.path}: is there already, and is not {output.kind.name}: --force "
                    "replaces it, another name keeps it"
                )


def replacements(outputs: Sequence[Output]) -> str:
    """A sentence on the files that will be replaced; "" if there are none."""
    there = [str(o.path) for o in outputs if o.path.is_file() and not o.stays]
    what = "exists; it is" if len(there) == 1 else "exist; they are"
    return f"{', '.join(there)} {what} replaced at the end" if there else ""


# -- which file is which, whatever its names ------------------------------------------------------


def _place(path: Path) -> Hashable:
    """The device and inode of a file, behind all links; of one that is not there its whole path."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: a NUL
        return os.path.abspath(path)  # noqa: PTH100  # Path.resolve refuses a link to itself
    return status.st_dev, status.st_ino


def _files(path: Path) -> Iterator[Path]:
    """A file with all parts of its model; those of a folder, and of a pattern."""
    yield path
    try:
        part = _PART.fullmatch(path.name)
        if part:
            yield from path.parent.glob(f"{glob.escape(part[1])}-*-of-{part[2]}.gguf")
        elif path.is_dir():
            names = (Path(to, name) for to, _, names in os.walk(path) for name in names)
            yield from islice(names, _MOST_FILES)
        elif glob.has_magic(str(path)):
            # Path.glob takes no pattern that is absolute.
            yield from map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207
    except (OSError, ValueError):  # whoever reads it says what is wrong
        return
