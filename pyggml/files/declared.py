"""What the files of a package declare, so that no list names them."""

from collections.abc import Iterable, Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

T = TypeVar("T")


def declared_in(package: str, path: Iterable[str], kind: type[T]) -> Iterator[T]:
    """The values of this kind in a package's files, alone or in tuples, file by file; one that
    several files have comes as often."""
    for file in iter_modules(path):
        for value in vars(import_module(f"{package}.{file.name}")).values():
            several = value if isinstance(value, tuple) else (value,)
            yield from (v for v in several if isinstance(v, kind))
