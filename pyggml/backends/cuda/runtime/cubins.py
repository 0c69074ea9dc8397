"""Compiled kernels of cards, kept on disk from process to process.

Numba's own cache pickles, and notices no edit of helpers in other files. Here a file is machine
code behind one line of JSON. Its name is a digest of all that it was made of: the sources of this
package and of the weight types, the versions of the compilers, the card's compute capability and
the one that it stands for, the function with what it closes over, and the types of its arguments. A
file that is not whole is made anew. It lies in a folder of the user, where the CPU's kernels lie
too.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

# It makes numba.cuda that of the package numba-cuda, so it comes first.
from pyggml.backends.cuda.runtime.driver import allow_shared  # isort: skip
from pyggml.backends.cuda.runtime.failures import is_failure, ran_out  # isort: skip

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.codegen import CUDACodeLibrary
from numba.cuda.core.caching import NullCache
from numba.cuda.cudadrv.driver import ObjectCode
from numba.cuda.dispatcher import _Kernel, get_current_device
from numba.cuda.typing import signature

from pyggml.backends.cuda.runtime.capability import own_of
from pyggml.backends.cuda.runtime.failures import lost_by
from pyggml.errors import PyggmlError
from pyggml.files import replacing
from pyggml.jit import CACHE

_COMPILERS = ("numba", "numba-cuda", "llvmlite", "cuda-core", "cuda-bindings")
_PLAIN = (bool, int, float, str, bytes, type(None), np.generic, np.dtype, types.Type, ir.Type)


@cache
def _folder() -> Path | None:
    """The folder for kernels of these sources and compilers; None if none can be kept."""
    if CACHE is None:
        return None
    package = Path(__file__).parents[3]
    used = (*package.glob("backends/cuda/**/*.py"), *package.glob("quants/**/*.py"))
    digest = hashlib.sha256(repr([sys.version, *map(version, _COMPILERS)]).encode())
    for source in sorted(used):
        digest.update(source.read_bytes())
    return Path(CACHE) / f"cuda-{digest.hexdigest()[:12]}"


def description_of(value: Any) -> Any:
    """What a function closes over, equal in every process; TypeError for what has no such form.

    The sources are in the folder's name. So a function is its place in them, its code (some are
    written by our own code) and its closure.
    """
    value = getattr(value, "py_func", getattr(value, "_defn", value))
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, tuple):
        return [description_of(v) for v in value]
    if isinstance(value, CodeType):
        consts = [description_of(c) for c in value.co_consts]
        return [value.co_code.hex(), consts, value.co_names, value.co_varnames]
    if isinstance(value, FunctionType):
        cells = [description_of(cell.cell_contents) for cell in value.__closure__ or ()]
        return [value.__module__, value.__qualname__, description_of(value.__code__), cells]
    name = getattr(value, "__name__", None)
    if name and (isinstance(value, type | ModuleType) or callable(value)):
        return f"{getattr(value, '__module__', '')} {name}"
    raise TypeError(f"{value!r} is no plain value")


class _FunctionsByCard(dict[int, Any]):
    """The functions of a kernel by card, as Numba loads them; each may take so much shared memory,
    which the driver is to be told for each card."""

    def __init__(self, shared_bytes: int, loaded: dict[int, Any]) -> None:
        super().__init__()
        self._shared_bytes = shared_bytes
        for index, function in loaded.items():
            self[index] = function

    def __setitem__(self, index: int, function: Any) -> None:
        allow_shared(function.handle, self._shared_bytes, index)
        super().__setitem__(index, function)


class Cubins(NullCache):  # type: ignore[misc]  # Numba has no types
    """Numba's hook for the kernels of one function: it asks for a signature, or hands a kernel."""

    def __init__(
        self, function: Callable, shared_bytes: int = 0, bounds: tuple[int, int] = (0, 1)
    ) -> None:
        """bounds: most threads of a block, and blocks, for which registers must be enough"""
        self._function, self._shared_bytes, self._bounds = function, shared_bytes, bounds

    def path(self, argtypes: tuple[Any, ...]) -> Path | None:
        """The file of the kernel of these argument types; None if none can be kept."""
        folder = _folder()
        if folder is None:
            return None
        try:
            function = description_of(self._function)
        except TypeError:
            return None
        card = get_current_device()
        capabilities = tuple(card.compute_capability), own_of(card)
        text = json.dumps([function, capabilities, str(argtypes), self._bounds])
        return folder / f"{self._function.__name__}-{hashlib.sha256(text.encode()).hexdigest()}"

    def _ready(self, kernel: Any) -> Any:
        """The kernel, loaded, and allowed to take its shared memory."""
        if self._shared_bytes:
            library = kernel._codelibrary
            library.get_cufunc()
            library._cufunc_cache = _FunctionsByCard(self._shared_bytes, library._cufunc_cache)
        return kernel

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kernel of these argument types, or None."""
        argtypes = tuple(getattr(sig, "args", sig))
        path = self.path(argtypes)
        stored = path and read(path)
        try:
            return stored and self._ready(kernel_of(*stored, argtypes))
        except Exception as error:
            if not is_failure(error) or ran_out(error) or lost_by(error) is not None:
                raise
            return None  # the driver does not take it

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a kernel that Numba has compiled. If it cannot be written, the next process compiles
        it again."""
        self._ready(data)
        path = self.path(tuple(getattr(sig, "args", sig)))
        if path is not None:
            keep(path, data)


def keep(path: Path, kernel: Any) -> None:
    """Write a kernel that Numba has compiled, if another launch may take it and the disk does."""
    if not kernel.cooperative and not kernel.launch_config_sensitive:
        with suppress(OSError, PyggmlError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, kernel.entry_name, kernel.library.get_cubin().code)


def write(path: Path, name: str, cubin: bytes) -> None:
    head = {"kernel": name, "sha256": hashlib.sha256(cubin).hexdigest()}
    with replacing(path) as out:
        out.write(json.dumps(head).encode() + b"\n" + cubin)


def read(path: Path) -> tuple[str, bytes] | None:
    """The name and the machine code of a kernel; None if the file is not there or not whole."""
    try:
        line, _, cubin = path.read_bytes().partition(b"\n")
        head = json.loads(line)
        whole = head["sha256"] == hashlib.sha256(cubin).hexdigest()
        return (str(head["kernel"]), cubin) if whole else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def kernel_of(name: str, cubin: bytes, argtypes: tuple[Any, ...]) -> Any:
    """A kernel as Numba makes it, for any card of the capability that it was compiled for."""
    library = CUDACodeLibrary(None, name, entry_name=name)
    library._cubin_cache[library._ensure_cc(None)] = ObjectCode.from_cubin(cubin, name=name)
    library._finalized = True
    kernel = _Kernel._rebuild(
        cooperative=False,
        name=name,
        signature=signature(types.void, *argtypes),
        codelibrary=library,
        debug=False,
        lineinfo=False,
        call_helper=None,
        extensions=[],
    )
    kernel.bind()
    return kernel
