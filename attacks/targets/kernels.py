"""The cache of compiled kernels: an index and machine code, both pickles under a digest."""

import atexit
import functools
import tempfile
from pathlib import Path
from typing import Any

from attacks.targets.target import Target
from pyggml.errors import PyggmlError

_KEY, _CODE = "key", {"code": b"\x7fELF" + bytes(range(256)), "name": "kernel"}
_SUFFIXES = "nbi", "nbc"  # index, code


class StrangeCodeError(AssertionError):
    """Code that was not written."""


@functools.cache
def _entry() -> tuple[Any, list[tuple[Path, bytes]]]:
    """An entry in the user's cache, and its files with their bytes."""
    from numba.core.caching import IndexDataCacheFile

    from pyggml.jit import CACHE

    folder = tempfile.TemporaryDirectory(dir=CACHE)
    atexit.register(folder.cleanup)
    file = IndexDataCacheFile(folder.name, "kernel", "stamp")
    file.save(_KEY, _CODE)
    paths = [next(Path(folder.name).glob(f"*.{suffix}")) for suffix in _SUFFIXES]
    return file, [(path, path.read_bytes()) for path in paths]


def _read(data: bytes) -> None:
    """Load the entry with the input in place of one of its files, which the first byte chooses.
    What is damaged counts as missing."""
    file, files = _entry()
    path, content = files[data[0] % len(files) if data else 0]
    try:
        path.write_bytes(data[1:])
        code = file.load(_KEY)
    finally:
        path.write_bytes(content)
    if code is None:
        raise PyggmlError("there is no such kernel")
    if code != _CODE:
        raise StrangeCodeError(f"{path.suffix}: another kernel was loaded")


def _seeds() -> list[bytes]:
    return [bytes([i]) + content for i, (_, content) in enumerate(_entry()[1])]


TARGETS = (
    Target(
        "kernels", "the cache of compiled kernels", _read, _seeds, (b"\x80\x05", b"cos\nsystem\n")
    ),
)
