"""Whether an output is possible, asked before the work: no run ends without a place for it."""

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from pyggml.cli.terminal.exit import at_end
from pyggml.cli.terminal.show import say_progress, size
from pyggml.errors import ConfigError, cause_of
from pyggml.files import behind_links


def check_output(path: Path, makes_folder: bool = True) -> None:
    """ConfigError if `path` cannot be written.

    makes_folder: whether the folder is created that it is to lie in, which is said
    """
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder, wanted the name of a file to write")
    _check_writable(path, makes_folder)


def beside(output: Path, suffix: str) -> Path:
    """adapter.gguf, .yaml -> adapter.yaml."""
    return output.with_name(output.name.removesuffix(".gguf") + suffix)


def _check_writable(path: Path, makes_folder: bool) -> None:
    """Make a file and remove it: the only check that holds on every system."""
    try:
        path = behind_links(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {cause_of(error)}") from None
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: is a device, wanted the name of a file to write")
        if makes_folder and not path.parent.exists():
            _make_folder(path.parent)
        there = (path.parent, *path.parent.parents)
        with tempfile.TemporaryFile(dir=next(p for p in there if makes_folder or p.exists())):
            pass
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be written: {path.parent}: {cause_of(error)}") from None


def _make_folder(folder: Path) -> None:
    """Create a folder and those above it; those in which nothing is at the end are removed, and of
    one that stays it is said that it was created."""
    absent = [p for p in (folder, *folder.parents) if not p.exists()]  # the innermost first
    folder.mkdir(parents=True)

    def settle() -> None:
        for each in absent:
            with suppress(OSError):  # something is in it
                each.rmdir()
        if folder.exists():
            say_progress(f"{folder}: folder created")

    at_end(settle)


def check_space(path: Path, n_bytes: int) -> None:
    """ConfigError if the disk of `path` has too little room; `path` need not exist yet."""
    there = path.absolute()
    folder = next(p for p in (there, *there.parents) if p.is_dir())
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise ConfigError(f"{path}: needs {size(n_bytes)}, but its disk has {size(free)} left")
