"""A parser under attack, and what the seeds of several are made of."""

import atexit
import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyggml import gguf
from pyggml.errors import PyggmlError
from pyggml.graph.dtypes import F32

Read = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class Target:
    """A parser.

    read       gives it an input
    seeds      makes inputs that it reads whole
    words      parts of its format that mutation puts in
    refusals   what it may raise
    """

    name: str
    about: str
    read: Read
    seeds: Callable[[], list[bytes]]
    words: tuple[bytes, ...] = ()
    refusals: tuple[type[Exception], ...] = (PyggmlError,)


@functools.cache
def folder() -> Path:
    """A folder of this process, in memory where the system has such."""
    memory = Path("/dev/shm")
    made = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
    atexit.register(made.cleanup)
    return Path(made.name)


def write_input(data: bytes, name: str) -> Path:
    """A file with these bytes."""
    path = folder() / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def gguf_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of a GGUF file."""
    path = folder() / "written.gguf"
    gguf.write(path, metadata, [(name, F32, a.shape, a) for name, a in tensors.items()])
    return path.read_bytes()


# Parts of formats that mutation puts in.
GGUF_WORDS = (b"GGUF", b"general.alignment", b"split.count", b"split.no", b"tensor")
_NAMES = ("text", "messages", "role", "content", "tool_calls", "weight", "train", "label")
JSON_WORDS = (
    *(f'"{name}"'.encode() for name in _NAMES),
    b"null",
    b"NaN",
    b"1e999",
    b"[[[[",
    b'{"a":',
    b"\\ud800",
    b"\r\n",
    b"-0",
)
